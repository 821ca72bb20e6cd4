// A page that is opened as a file may start no Worker: the search then runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<body></body>";
      this.ready = new Promise((done) => {
        this.frame.onload = () => {
          const inner = this.frame.contentWindow;
          const run = (source) =>
            new Promise((loaded) => {
              const script = inner.document.createElement("script");
              script.src = source;
              script.onload = loaded;
              inner.document.body.append(script);
            });
          inner.postMessage = (data) => {
            const event = new MessageEvent("message", { data });
            this.dispatchEvent(event);
            if (this.onmessage) this.onmessage(event);
          };
          inner.importScripts = (...sources) => Promise.all(sources.map(run));
          run(url).then(done);
        };
      });
      document.documentElement.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => {
        const inner = this.frame.contentWindow;
        inner.dispatchEvent(new MessageEvent("message", { data }));
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
}
