"use strict";
/* The arithmetic of boxes {lo, hi} that a reader changes in the page: the reads of another job. */
const ckptLayout = (() => {
  const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
  const numel = (box) => product(box.lo.map((lo, dim) => Math.max(0, box.hi[dim] - lo)));

  /* Boxes of equal first index stay together, so that bisection finds those that meet a box. */
  function indexed(found) {
    const sorted = [...found].sort((a, b) => (a.box.lo[0] ?? 0) - (b.box.lo[0] ?? 0));
    const reach = sorted.reduce((most, { box }) => Math.max(most, (box.hi[0] ?? 1) - (box.lo[0] ?? 0)), 0);
    return { sorted, starts: sorted.map(({ box }) => box.lo[0] ?? 0), reach };
  }

  /* Calls `each(piece, elements)` for the pieces that share elements with a box. */
  function overlaps(index, box, each) {
    const from = (box.lo[0] ?? 0) - index.reach + 1, until = box.hi[0] ?? 1;
    let low = 0, high = index.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (index.starts[middle] < from) low = middle + 1;
      else high = middle;
    }
    for (let at = low; at < index.starts.length && index.starts[at] < until; at++) {
      const other = index.sorted[at].box;
      const shared = numel({
        lo: box.lo.map((lo, dim) => Math.max(lo, other.lo[dim])),
        hi: box.hi.map((hi, dim) => Math.min(hi, other.hi[dim])),
      });
      if (shared > 0) each(index.sorted[at], shared);
    }
  }

  /* The boxes of a job of `ranks` ranks, [{rank, box}]: cut along `dim` by torch.chunk's rule, or
   * whole on each rank if it is null or if the tensor lacks the dimension. */
  function jobPieces(shape, ranks, dim) {
    const found = [], isCut = dim !== null && dim < shape.length, step = Math.ceil(shape[dim] / ranks);
    for (let rank = 0; rank < ranks; rank++) {
      const box = { lo: shape.map(() => 0), hi: [...shape] };
      if (isCut) {
        box.lo[dim] = Math.min(shape[dim], rank * step);
        box.hi[dim] = Math.min(shape[dim], (rank + 1) * step);
      }
      if (numel(box)) found.push({ rank, box });
    }
    return found;
  }

  return { indexed, jobPieces, numel, overlaps, product };
})();
if (typeof module !== "undefined") module.exports = ckptLayout;
