"use strict";
/* The page: a tree of names, and views of the checkpoint. All text of the checkpoint enters the
 * page by textContent, so a name is never markup. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MOST_RECTANGLES = 4096, MOST_COLOURS = 48, MOST_ROWS = 200, MOST_FOUND = 500, MOST_AREAS = 60, DEEPEST = 3;
  const byId = (id) => document.getElementById(id);

  /* ---- elements of the page ---- */

  function make(tag, attributes = {}, ...children) {
    const element = tag.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") element.style.cssText = value;
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    for (const child of children) element.append(child);
    return element;
  }

  const count = (number) => number.toLocaleString("en-US");

  function size(bytes) {
    if (bytes < 1000) return `${Math.round(bytes)} B`;
    const units = ["kB", "MB", "GB", "TB", "PB"];
    let value = bytes / 1000, unit = 0;
    while (value >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
    return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${units[unit]}`;
  }

  /* A table of texts and numbers; a cell can be an element. A title sorts by its column. Long
   * tables grow by a button. `total` has the cells of a last row. */
  function table(caption, head, rows, total) {
    const body = make("tbody");
    const numeric = head.map((_, column) => rows.length > 0 && isNumeric(rows[0][column]));
    const add = (upTo) => {
      for (const row of rows.slice(body.rows.length, upTo)) {
        body.append(make("tr", {}, ...row.map((cell, column) => cellOf(cell, numeric[column]))));
      }
    };
    add(MOST_ROWS);
    const titles = head.map((title, column) => {
      const cell = make("th", { scope: "col", class: numeric[column] ? "number" : null });
      if (!title || rows.length < 2) return cell.append(title), cell;
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => {
        const isDown = cell.getAttribute("aria-sort") !== "descending";
        for (const other of titles) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        rows = [...rows].sort((a, b) => compare(valueOf(a[column]), valueOf(b[column])) * (isDown ? -1 : 1));
        const shown = body.rows.length;
        body.replaceChildren();
        add(shown);
      });
      cell.append(button);
      return cell;
    });
    const whole = make("div", { class: "wide" },
      make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, ...titles)), body));
    if (total && rows.length > 1) {
      whole.firstChild.append(make("tfoot", {}, make("tr", {}, ...total.map((cell, column) => cellOf(cell, numeric[column])))));
    }
    if (rows.length > MOST_ROWS) {
      const more = make("button", { type: "button" }, `Show all ${count(rows.length)} rows`);
      more.addEventListener("click", () => { add(rows.length); more.remove(); });
      whole.append(more);
    }
    return whole;
  }

  const isNumeric = (cell) => typeof cell === "number" || (cell instanceof Element && cell.classList.contains("number"));
  const numberCell = (text, value) => make("span", { class: "number", "data-value": value }, text);
  const sizeCell = (bytes) => numberCell(size(bytes), bytes);
  const valueOf = (cell) => cell instanceof Element ? Number(cell.dataset.value ?? cell.textContent) : cell;
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? (Number.isNaN(a) ? Infinity : a) - (Number.isNaN(b) ? Infinity : b)
    : String(a).localeCompare(String(b), "en", { numeric: true });

  /* A text that may break after dots, underscores and slashes, and within no word. */
  function breakable(text) {
    const parts = String(text).split(/(?<=[._/])/);
    return make("span", {}, ...parts.flatMap((part, at) => at ? [make("wbr"), part] : [part]));
  }

  function cellOf(cell, isNumber) {
    const content = typeof cell === "number" ? count(cell) : cell instanceof Element ? cell : breakable(cell);
    const isMeter = content instanceof Element && content.classList.contains("bar");
    return make("td", { class: isMeter ? "meter" : isNumber ? "number" : null }, content);
  }

  function bar(part, most) {
    const width = most > 0 ? Math.max(0.3, (100 * part) / most) : 0;
    return make("span", { class: "bar", "aria-hidden": "true", style: `width:${width}%` });
  }

  /* ---- the checkpoint ---- */

  const tensors = data.tensors.map(([name, dtype, shape, bytes, where], number) => {
    const elements = ckptLayout.product(shape);
    return { number, name, dtype, shape, bytes, where, elements, itemsize: elements ? bytes / elements : 0 };
  });
  const files = data.files.map(([name, bytes, digest, rank]) => ({ name, bytes, digest, rank }));
  const fileOfRank = new Map(files.filter((file) => file.rank !== null).map((file) => [file.rank, file.name]));
  const isSymbolic = (tensor) => typeof tensor.where === "number";

  /* The stored pieces of a tensor: [{rank, box}]; without layouts `rank` is the number of a file.
   * Tensors of one layout share them. */
  const known = new Map();
  function piecesOf(tensor) {
    if (!isSymbolic(tensor)) {
      return tensor.where.map(([file, at, lo, hi]) => ({ rank: file, at, box: { lo, hi } }));
    }
    if (!known.has(tensor.where)) {
      const boxes = data.layouts[tensor.where][1];
      known.set(tensor.where, boxes.flatMap(([lo, hi, ranks]) => ranks.map((rank) => ({ rank, box: { lo, hi } })))
        .sort((a, b) => a.rank - b.rank));
    }
    return known.get(tensor.where);
  }

  const hasRanks = fileOfRank.size > 0;
  const holder = (rank) => hasRanks ? `rank ${rank}` : files[rank]?.name ?? "another file";

  /* The elements that each holder has of a tensor. */
  const held = new Map();
  function elementsByHolder(tensor) {
    const key = isSymbolic(tensor) ? tensor.where : `#${tensor.number}`;
    if (!held.has(key)) {
      const found = new Map();
      for (const { rank, box } of piecesOf(tensor)) {
        found.set(rank, (found.get(rank) ?? 0) + ckptLayout.numel(box));
      }
      held.set(key, found);
    }
    return held.get(key);
  }

  /* ---- the tree of names ---- */

  const root = { name: "", path: "", children: new Map(), tensor: null, bytes: 0, tensors: 0 };
  for (const tensor of tensors) {
    let node = root;
    const parts = tensor.name.split(".");
    for (const [depth, part] of parts.entries()) {
      node.bytes += tensor.bytes;
      node.tensors += 1;
      if (!node.children.has(part)) {
        const path = parts.slice(0, depth + 1).join(".");
        node.children.set(part, { name: part, path, children: new Map(), tensor: null, bytes: 0, tensors: 0 });
      }
      node = node.children.get(part);
    }
    node.bytes += tensor.bytes;
    node.tensors += 1;
    node.tensor = tensor;
  }

  let selected = root, tab = "overview";

  function itemOf(node, label, level) {
    const isBranch = node.children.size > 0;
    const item = make("li", { role: "treeitem", tabindex: "-1", "aria-level": String(level), "aria-selected": "false" },
      make("div", { class: "row" }, make("span", { class: "name" }, label), make("span", { class: "size" }, size(node.bytes))));
    item.setAttribute("aria-label", `${label}, ${size(node.bytes)}, ${count(node.tensors)} tensors`);
    if (isBranch) item.setAttribute("aria-expanded", "false");
    item.node = node;
    return item;
  }

  function expand(item, open) {
    if (!item.hasAttribute("aria-expanded")) return;
    item.setAttribute("aria-expanded", String(open));
    const group = item.querySelector(':scope > [role="group"]');
    if (open && !group) {
      const level = Number(item.getAttribute("aria-level")) + 1;
      item.append(make("ul", { role: "group" },
        ...[...item.node.children.values()].map((child) => itemOf(child, child.name, level))));
    } else if (group) group.hidden = !open;
  }

  function select(item, isOpening) {
    for (const before of byId("tree").querySelectorAll('[aria-selected="true"]')) before.setAttribute("aria-selected", "false");
    item.setAttribute("aria-selected", "true");
    focusOn(item);
    selected = item.node;
    if (isOpening) expand(item, item.getAttribute("aria-expanded") !== "true");
    if (tab !== "tensor") show("tensor");
    else render();
  }

  function focusOn(item) {
    for (const before of byId("tree").querySelectorAll('[tabindex="0"]')) before.tabIndex = -1;
    item.tabIndex = 0;
    item.focus({ preventScroll: false });
  }

  const visible = () => [...byId("tree").querySelectorAll('[role="treeitem"]')].filter((item) => item.offsetParent !== null);

  function onTreeKey(event) {
    const item = event.target.closest('[role="treeitem"]');
    if (!item) return;
    const items = visible(), at = items.indexOf(item), isOpen = item.getAttribute("aria-expanded") === "true";
    const moves = {
      ArrowDown: () => items[at + 1] && focusOn(items[at + 1]),
      ArrowUp: () => items[at - 1] && focusOn(items[at - 1]),
      Home: () => focusOn(items[0]),
      End: () => focusOn(items[items.length - 1]),
      ArrowRight: () => isOpen ? items[at + 1] && focusOn(items[at + 1]) : expand(item, true),
      ArrowLeft: () => {
        const above = item.parentElement.closest('[role="treeitem"]');
        if (isOpen) expand(item, false);
        else if (above) focusOn(above);
      },
      Enter: () => select(item, true),
      " ": () => select(item, true),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  function drawTree(query) {
    const tree = byId("tree"), wanted = query.trim().toLowerCase();
    tree.replaceChildren();
    byId("found").textContent = "";
    if (wanted) {
      const found = tensors.filter((tensor) => tensor.name.toLowerCase().includes(wanted));
      for (const tensor of found.slice(0, MOST_FOUND)) {
        const node = { name: tensor.name, path: tensor.name, children: new Map(), tensor, bytes: tensor.bytes, tensors: 1 };
        tree.append(itemOf(node, tensor.name, 1));
      }
      const left = found.length > MOST_FOUND ? `; the first ${count(MOST_FOUND)} are shown` : "";
      byId("found").textContent = `${count(found.length)} found${left}`;
    } else {
      for (const child of root.children.values()) tree.append(itemOf(child, child.name, 1));
      if (root.children.size === 1 && tree.firstChild) expand(tree.firstChild, true);
    }
    const first = tree.querySelector('[role="treeitem"]');
    if (first) first.tabIndex = 0;
  }

  /* ---- views ---- */

  /* The sizes of parts as areas: the largest first, each row about as high as wide. */
  function squares(parts, box) {
    const placed = [], all = parts.reduce((sum, one) => sum + one.bytes, 0);
    let { x, y, width, height } = box, rest = all, at = 0;
    while (at < parts.length && rest > 0) {
      const short = Math.min(width, height), scale = (width * height) / rest;
      let row = [], sum = 0, worst = Infinity;
      while (at + row.length < parts.length) {
        const next = parts[at + row.length].bytes, total = (sum + next) * scale, side = total / short;
        const ratio = Math.max(...[...row, next].map((one) => {
          const other = (one * scale) / side;
          return Math.max(side / other, other / side);
        }));
        if (row.length && ratio > worst) break;
        row.push(next);
        [sum, worst] = [sum + next, ratio];
      }
      const side = (sum * scale) / short;
      let along = 0;
      for (const bytes of row) {
        const other = (bytes * scale) / side;
        placed.push(width >= height
          ? { part: parts[at], x, y: y + along, width: side, height: other }
          : { part: parts[at], x: x + along, y, width: other, height: side });
        [along, at] = [along + other, at + 1];
      }
      if (width >= height) [x, width] = [x + side, width - side];
      else [y, height] = [y + side, height - side];
      rest -= sum;
    }
    return placed;
  }

  /* A node, or the part below it in which it forks. */
  function forked(node) {
    while (node.children.size === 1) [node] = node.children.values();
    return node;
  }

  /* The modules below a node as areas, two levels deep, and deeper where an area is large. The
     outer ones can be reached and chosen by keys. */
  function treemap(node, isFirst = true) {
    const isNarrow = window.innerWidth < 800, width = isNarrow ? 400 : 900, height = 420;
    const drawing = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, class: "treemap", role: "group", "aria-label": "Modules by size", style: "max-width:none" });
    const childrenOf = (one) => [...forked(one).children.values()].filter((child) => child.bytes).sort((a, b) => b.bytes - a.bytes).slice(0, MOST_AREAS);
    const draw = (one, box, hue, depth) => {
      const text = `${one.path}: ${size(one.bytes)}, ${count(one.tensors)} tensors`, isInner = depth > 0;
      const colour = `hsl(${hue} 55% var(--area${depth % 2 ? "-inner" : ""}))`;
      const part = make("svg:g", { role: "button", tabindex: isInner ? "-1" : "0", "aria-label": text }, make("svg:title", {}, text),
        make("svg:rect", { x: box.x, y: box.y, width: Math.max(0.5, box.width - 1), height: Math.max(0.5, box.height - 1), rx: 2, style: `fill:${colour}` }));
      const room = Math.floor((box.width - 8) / 6.5);
      if (room >= 3 && box.height > 15) {
        const name = isInner ? one.name : forked(one).path.slice(one.path.length - one.name.length);
        const label = name.length > room ? `${name.slice(0, room - 1)}…` : name;
        part.append(make("svg:text", { x: box.x + 4, y: box.y + 12 }, label));
      }
      const choose = (event) => { event.stopPropagation(); event.preventDefault(); reveal(one); };
      part.addEventListener("click", choose);
      part.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") choose(event); });
      drawing.append(part);
      const inside = { x: box.x + 3, y: box.y + 16, width: box.width - 7, height: box.height - 20 };
      const least = isInner ? 60 : 12;
      if (depth === DEEPEST || inside.width < least || inside.height < least) return;
      for (const { part: child, ...place } of squares(childrenOf(one), inside)) draw(child, place, hue, depth + 1);
    };
    squares(childrenOf(node), { x: 0, y: 0, width, height }).forEach(({ part, ...box }, at) =>
      draw(part, box, (205 + at * 137.508) % 360, 0));
    const outer = !isFirst ? "" : " A click, or Tab and Enter, opens a part.";
    return make("figure", {}, drawing, make("figcaption", {}, `Areas are bytes: the parts of ${node.path || "the checkpoint"}, and in each its own parts.${outer}`));
  }

  /* Shows a node in the tree, with all above it opened, and its view. */
  function reveal(node) {
    byId("search").value = "";
    drawTree("");
    let items = [...byId("tree").children], item = null;
    for (const part of node.path.split(".")) {
      item = items.find((one) => one.node.name === part);
      if (!item) return;
      expand(item, true);
      items = [...(item.querySelector(':scope > [role="group"]')?.children ?? [])];
    }
    select(item, false);
  }

  function overviewView() {
    const facts = data.facts.map(([label, value, note, mark]) => make("div", { class: mark || null },
      make("dt", {}, label.replaceAll("_", " ")), make("dd", {}, value), ...(note ? [make("dd", {}, note)] : [])));
    return [make("h2", {}, "At a glance"), make("dl", { class: "facts" }, ...facts),
      make("h2", {}, "Modules"), treemap(root), ...totalsView()];
  }

  function totalsView() {
    const byType = new Map();
    for (const { dtype, elements, bytes } of tensors) {
      const row = byType.get(dtype) ?? [0, 0, 0];
      byType.set(dtype, [row[0] + 1, row[1] + elements, row[2] + bytes]);
    }
    const rows = [...byType].sort((a, b) => b[1][2] - a[1][2])
      .map(([dtype, [number, elements, bytes]]) => [dtype, number, elements, sizeCell(bytes), bar(bytes, root.bytes)]);
    const found = [make("h2", {}, "Bytes by dtype"), table("Bytes by dtype", ["dtype", "tensors", "elements", "bytes", ""], rows,
      ["all", tensors.length, tensors.reduce((sum, one) => sum + one.elements, 0), sizeCell(root.bytes), ""])];
    const meta = Object.entries(data.metadata);
    if (meta.length) found.push(make("h2", {}, "Provenance"), table("Provenance", ["key", "value"], meta));
    const summed = files.filter((file) => file.digest).length;
    found.push(make("h2", {}, "Checksums"), make("p", {}, summed
      ? `${count(summed)} of ${count(files.length)} files have a digest here. ckpt verify compares every bit with its checksum.`
      : "This format keeps no digest of its files here. ckpt verify says which checks its files allow."));
    if (data.chain.length) {
      found.push(make("h2", {}, "Incremental chain"),
        make("p", {}, "Unchanged chunks lie in these folders beside this one; they cannot be deleted before it."),
        make("ol", {}, ...data.chain.map((folder) => make("li", {}, folder))));
    }
    const tied = Object.entries(data.aliases);
    if (tied.length) found.push(make("h2", {}, "Tied names"), table("Tied names", ["name", "is stored as"], tied));
    if (data.notes.length) found.push(make("h2", {}, "Notes"), make("ul", {}, ...data.notes.map((note) => make("li", {}, note))));
    if (data.values.length) {
      found.push(make("h2", {}, "Plain values"), table("Plain values", ["name", "value"], data.values));
      if (data.values_left_out) found.push(make("p", { class: "warn" }, `${count(data.values_left_out)} more values are not in this page.`));
    }
    return found;
  }

  function tensorView() {
    if (selected.tensor) return oneTensor(selected.tensor);
    const rows = [...selected.children.values()].sort((a, b) => b.bytes - a.bytes)
      .map((child) => [child.name, child.tensors, sizeCell(child.bytes), bar(child.bytes, selected.bytes)]);
    return [make("h2", {}, breakable(selected.path || "The whole checkpoint")),
      make("p", {}, `${count(selected.tensors)} tensors, ${size(selected.bytes)}`), treemap(selected, false),
      table("Parts", ["part", "tensors", "bytes", ""], rows, ["all", selected.tensors, sizeCell(selected.bytes), ""])];
  }

  function oneTensor(tensor) {
    const found = [make("h2", {}, breakable(tensor.name)),
      make("p", {}, `${tensor.dtype}, shape [${tensor.shape.join(", ")}], ${count(tensor.elements)} elements, ${size(tensor.bytes)}`)];
    if (isSymbolic(tensor)) found.push(make("p", {}, `Layout: ${data.layouts[tensor.where][0]}`));
    const pieces = piecesOf(tensor);
    if (!pieces.length && tensor.elements) {
      found.push(make("p", { class: "warn" }, "The pieces of this tensor are not in this page: the checkpoint has too many pieces."));
      return found;
    }
    if (pieces.length) found.push(picture(tensor, pieces));
    const rows = pieces.map(({ rank, at, box }) => [
      holder(rank), hasRanks ? fileOfRank.get(rank) ?? "" : at === undefined ? "" : `byte ${count(at)}`,
      `[${box.lo.map((lo, dim) => `${lo}:${box.hi[dim]}`).join(", ")}]`, sizeCell(ckptLayout.numel(box) * tensor.itemsize)]);
    found.push(make("h2", {}, "Pieces"), table("Pieces", [hasRanks ? "rank" : "file", hasRanks ? "file" : "begins at", "elements", "bytes"], rows));
    return found;
  }

  /* A colour of its own for each of a few holders; a ramp in the order of many. */
  const colourOf = (ranks) => ranks <= MOST_COLOURS
    ? (rank) => `hsl(${(rank * 137.508) % 360} 62% ${rank % 2 ? 66 : 78}%)`
    : (rank) => `hsl(${200 + (60 * rank) / ranks} 60% ${86 - (46 * rank) / ranks}%)`;

  /* Dimensions 0 and 1 of the tensor, with a rectangle for each piece. */
  function picture(tensor, pieces) {
    const [rows, columns] = tensor.shape.length > 1 ? tensor.shape : [1, tensor.shape[0] ?? 1];
    const width = 700, height = Math.round(Math.min(360, Math.max(48, (width * rows) / Math.max(1, columns))));
    const drawing = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    const told = `${count(pieces.length)} pieces of ${tensor.name} in ${count(elementsByHolder(tensor).size)} ${hasRanks ? "ranks" : "files"}`;
    drawing.append(make("svg:title", {}, told));
    const drawn = pieces.slice(0, MOST_RECTANGLES);
    const colour = colourOf(1 + drawn.reduce((most, { rank }) => Math.max(most, rank), 0));
    const labels = [];
    for (const { rank, box } of drawn) {
      const spans = tensor.shape.length > 1 ? [0, 1].map((dim) => [box.lo[dim], box.hi[dim]]) : [[0, 1], [box.lo[0] ?? 0, box.hi[0] ?? 1]];
      const [y, y2] = spans[0].map((value) => (value / Math.max(1, rows)) * height);
      const [x, x2] = spans[1].map((value) => (value / Math.max(1, columns)) * width);
      const text = `${holder(rank)}: [${box.lo.map((lo, dim) => `${lo}:${box.hi[dim]}`).join(", ")}]`;
      const part = make("svg:g", {}, make("svg:title", {}, text), make("svg:rect", {
        x, y, width: Math.max(0.5, x2 - x), height: Math.max(0.5, y2 - y), fill: colour(rank),
        stroke: pieces.length < 200 ? "#33415a" : "none", "stroke-width": 0.7 }));
      drawing.append(part);
      if (!labels.some((one) => Math.abs(one.x - x) < 40 && Math.abs(one.y - y) < 16)) labels.push({ x, y, rank });
    }
    for (const { x, y, rank } of labels) {
      if (x < width - 12 && y < height - 12) drawing.append(make("svg:text", { x: x + 4, y: y + 13 }, String(rank)));
    }
    const axes = tensor.shape.length > 1 ? "Dimension 0 runs down, dimension 1 to the right." : "The tensor runs to the right.";
    const others = tensor.shape.length > 2 ? " Other dimensions are not drawn." : "";
    const left = pieces.length > drawn.length ? ` The first ${count(drawn.length)} pieces are drawn.` : "";
    return make("figure", {}, drawing, make("figcaption", {},
      `${axes}${others} The numbers are ${hasRanks ? "ranks" : "files, in the order of the table of files"}${labels.length < drawn.length ? "; not every piece has room for its number" : ""}.${left}`));
  }

  function ranksView() {
    const bytes = new Map(), number = new Map();
    for (const tensor of tensors) {
      for (const [rank, elements] of elementsByHolder(tensor)) {
        bytes.set(rank, (bytes.get(rank) ?? 0) + elements * tensor.itemsize);
        number.set(rank, (number.get(rank) ?? 0) + 1);
      }
    }
    const sorted = [...bytes.values()].sort((a, b) => a - b), most = sorted[sorted.length - 1] ?? 0;
    const found = [make("h2", {}, hasRanks ? "Bytes of tensors by rank" : "Bytes of tensors by file")];
    if (sorted.length) {
      const mean = sorted.reduce((sum, one) => sum + one, 0) / sorted.length;
      found.push(make("p", {}, `${count(sorted.length)} ${hasRanks ? "ranks" : "files"}: least ${size(sorted[0])}, ` +
        `median ${size(sorted[sorted.length >> 1])}, most ${size(most)}; the most is ${(most / mean).toFixed(3)} of the mean.`));
    }
    const rows = [...bytes].sort((a, b) => a[0] - b[0])
      .map(([rank, part]) => [holder(rank), number.get(rank), sizeCell(part), bar(part, most)]);
    const held = [...bytes.values()].reduce((a, b) => a + b, 0), all = [...number.values()].reduce((a, b) => a + b, 0);
    found.push(table("Balance", [hasRanks ? "rank" : "file", "tensors", "bytes", ""], rows, ["all", all, sizeCell(held), ""]));
    found.push(make("h2", {}, "Files"), table("Files", ["file", "size", "digest"],
      files.map((file) => [file.name, sizeCell(file.bytes), file.digest || "none"]),
      ["all", sizeCell(files.reduce((sum, file) => sum + file.bytes, 0)), ""]));
    if (data.pieces_left_out) found.push(make("p", { class: "warn" }, `${count(data.pieces_left_out)} pieces are not in this page and not counted above.`));
    return found;
  }

  const job = { ranks: 2, dim: 0, rank: 0 };

  function reshardView() {
    const form = make("div", { class: "form" });
    const field = (label, control) => form.append(make("label", {}, `${label} `, control));
    const ranks = make("input", { id: "job-ranks", type: "number", min: "1", max: "65536", value: String(job.ranks) });
    const dim = make("select", { id: "job-dim" },
      ...[["0", "shard(0)"], ["1", "shard(1)"], ["replicate", "replicate"]].map(([value, text]) => make("option", { value }, text)));
    dim.value = job.dim === null ? "replicate" : String(job.dim);
    const rank = make("input", { id: "job-rank", type: "number", min: "0", value: String(job.rank) });
    field("Ranks of the job", ranks);
    field("Placement", dim);
    field("Show rank", rank);
    const result = make("div", { id: "job", role: "region", "aria-label": "Reads of the job" });
    const compute = () => {
      job.ranks = Math.min(65536, Math.max(1, Math.floor(Number(ranks.value) || 1)));
      job.dim = dim.value === "replicate" ? null : Number(dim.value);
      job.rank = Math.min(job.ranks - 1, Math.max(0, Math.floor(Number(rank.value) || 0)));
      result.replaceChildren(...reads());
    };
    for (const control of [ranks, dim, rank]) control.addEventListener("change", compute);
    compute();
    return [make("h2", {}, "What a job would read"),
      make("p", {}, "Every tensor is cut along one dimension over the ranks of the job; a tensor without that dimension is replicated. " +
        "Bytes are those of the elements: ckpt plan also counts the rest of checksummed chunks."), form, result];
  }

  /* The bytes of each rank of the job, and the sources of one rank. */
  function reads() {
    const totals = new Array(job.ranks).fill(0), sources = new Map(), cache = new Map();
    for (const tensor of tensors) {
      const key = isSymbolic(tensor) ? tensor.where : `#${tensor.number}`;
      if (!cache.has(key)) cache.set(key, readsOf(tensor));
      const { byRank, from } = cache.get(key);
      for (const [rank, elements] of byRank) totals[rank] += elements * tensor.itemsize;
      for (const [rank, elements] of from) {
        const row = sources.get(rank) ?? [0, 0];
        sources.set(rank, [row[0] + 1, row[1] + elements * tensor.itemsize]);
      }
    }
    const most = totals.reduce((a, b) => Math.max(a, b), 0), all = totals.reduce((a, b) => a + b, 0);
    const greatest = [...sources.values()].reduce((a, [, bytes]) => Math.max(a, bytes), 0);
    const mine = [...sources].sort((a, b) => a[0] - b[0])
      .map(([rank, [number, bytes]]) => [holder(rank), hasRanks ? fileOfRank.get(rank) ?? "" : "", number, sizeCell(bytes), bar(bytes, greatest)]);
    return [make("p", {}, `${count(job.ranks)} ranks hold ${size(all)} in all, at most ${size(most)} each.`),
      make("h2", {}, `Rank ${job.rank} holds ${size(totals[job.rank])}, from ${count(mine.length)} ${hasRanks ? "ranks" : "files"}`),
      table("Sources", [hasRanks ? "rank" : "file", hasRanks ? "file" : "", "tensors", "bytes", ""], mine),
      make("h2", {}, "All ranks of the job"),
      table("Ranks of the job", ["rank", "bytes", ""], totals.map((bytes, rank) => [`rank ${rank}`, sizeCell(bytes), bar(bytes, most)]),
        ["all", sizeCell(all), ""])];
  }

  function readsOf(tensor) {
    const byRank = new Map(), from = new Map();
    const index = ckptLayout.indexed(piecesOf(tensor));
    for (const { rank, box } of ckptLayout.jobPieces(tensor.shape, job.ranks, job.dim)) {
      byRank.set(rank, (byRank.get(rank) ?? 0) + ckptLayout.numel(box));
      if (rank !== job.rank) continue;
      ckptLayout.overlaps(index, box, (piece, elements) => from.set(piece.rank, (from.get(piece.rank) ?? 0) + elements));
    }
    return { byRank, from };
  }

  function differencesView() {
    const told = data.differences;
    const found = [make("h2", {}, "Differences"), make("p", {}, `A is ${told.a}`), make("p", {}, `B is ${told.b}`), make("p", {}, told.summary)];
    const names = [...told.only_a.map((name) => [name, "only in A"]), ...told.only_b.map((name) => [name, "only in B"])];
    if (names.length) found.push(make("h2", {}, "Names"), table("Names", ["name", "where"], names));
    if (told.tensors.length) {
      found.push(make("h2", {}, "Tensors"), table("Changed tensors",
        ["name", "largest |a - b|", "|a - b| by power of ten", "differing", "elements"],
        told.tensors.map((one) => [one.name, one.problem === "values" ? numberCell(one.largest, Number(one.largest.replace("inf", "Infinity"))) : one.detail, histogram(one, told.decades), one.differing, one.elements]),
        ["all", "", "", told.tensors.reduce((sum, one) => sum + one.differing, 0), told.tensors.reduce((sum, one) => sum + one.elements, 0)]));
    }
    const values = [...told.values, ...told.structure].map((one) => [one.name, one.a ?? "missing", one.b ?? "missing"]);
    if (values.length) found.push(make("h2", {}, "Values and structure"), table("Values", ["name", "A", "B"], values));
    return found;
  }

  /* The shares of a tensor's elements. All tensors have one axis: the decades of the comparison. */
  function histogram(one, decades) {
    if (!one.histogram.length) return "";
    const numbers = new Map(one.histogram), width = Math.min(30, 360 / decades.length), every = Math.ceil(30 / width);
    const drawing = make("svg:svg", { viewBox: `0 0 ${decades.length * width} 44`, class: "histogram", role: "img", style: `width:${decades.length * width}px` });
    drawing.append(make("svg:title", {}, one.histogram.map(([label, number]) => `${label}: ${count(number)}`).join(", ")));
    decades.forEach((label, at) => {
      const share = (numbers.get(label) ?? 0) / Math.max(1, one.elements), height = share ? Math.max(1, 30 * share) : 0;
      drawing.append(make("svg:rect", { x: (at + 0.1) * width, y: 32 - height, width: 0.8 * width, height, fill: "var(--bar)" }));
      if ((decades.length - 1 - at) % every) return;
      const isFirst = at * width < 12, isLast = at === decades.length - 1;
      const place = isLast ? { x: decades.length * width - 1, "text-anchor": "end" } : isFirst ? { x: 1 } : { x: (at + 0.5) * width, "text-anchor": "middle" };
      drawing.append(make("svg:text", { ...place, y: 42, style: "font-size:8px;fill:var(--ink)" }, label));
    });
    return drawing;
  }

  const VIEWS = [["overview", "Overview", overviewView], ["tensor", "Tensors", tensorView],
    ["ranks", hasRanks ? "Ranks and files" : "Files", ranksView], ["reshard", "Reshard", reshardView]];
  if (data.differences) VIEWS.unshift(["differences", "Differences", differencesView]);

  function show(name) {
    tab = name;
    for (const button of byId("tabs").children) {
      const isThis = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", String(isThis));
      button.tabIndex = isThis ? 0 : -1;
    }
    byId("panel").setAttribute("aria-labelledby", `tab-${name}`);
    render();
  }

  function render() {
    const [, , view] = VIEWS.find(([name]) => name === tab);
    byId("panel").replaceChildren(...view());
    byId("content").scrollTop = 0;
  }

  function onTabKey(event) {
    const at = VIEWS.findIndex(([name]) => name === tab), last = VIEWS.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at + last, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const [next] = VIEWS[to % VIEWS.length];
    show(next);
    byId(`tab-${next}`).focus();
  }

  function setTheme(isDark) {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    byId("theme").textContent = isDark ? "Light" : "Dark";
  }

  byId("title").append(breakable(data.name));
  byId("summary").textContent = `${data.url}: ${data.format}, ${count(tensors.length)} tensors, ${size(root.bytes)}, ` +
    `${count(files.length)} files, ${size(files.reduce((sum, file) => sum + file.bytes, 0))}`;
  for (const [name, label] of VIEWS) {
    const button = make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel" }, label);
    button.addEventListener("click", () => show(name));
    byId("tabs").append(button);
  }
  byId("tabs").addEventListener("keydown", onTabKey);
  byId("tree").addEventListener("keydown", onTreeKey);
  byId("tree").addEventListener("click", (event) => {
    const item = event.target.closest('[role="treeitem"]');
    if (item) select(item, true);
  });
  byId("search").addEventListener("input", (event) => drawTree(event.target.value));
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(system.matches);
  system.addEventListener("change", follow);
  byId("theme").addEventListener("click", () => {
    system.removeEventListener("change", follow);
    setTheme(document.documentElement.dataset.theme !== "dark");
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      byId("search").focus();
    }
    if (event.key === "Escape" && document.activeElement === byId("search")) {
      byId("search").value = "";
      drawTree("");
    }
  });
  follow();
  drawTree("");
  show(VIEWS[0][0]);
})();
