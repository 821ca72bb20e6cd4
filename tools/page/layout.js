"use strict";
/* The layout algebra of sharding/layout in JavaScript: the boxes of a tensor that each rank holds.
 *
 * A layout is {shape, mesh: {names, sizes, offset, strides, table}, placements}. A placement is
 * ["R"], ["S", dim], ["SS", dim, split], ["F", offset, stride], ["split"] or ["only", index], as
 * in sharding/layout/placement.py. A box is {lo, hi}. tests/page checks every function here against
 * Python on random layouts.
 */
const ckptLayout = (() => {
  const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
  const numel = (box) => product(box.lo.map((lo, dim) => Math.max(0, box.hi[dim] - lo)));

  function rowMajor(shape) {
    const strides = new Array(shape.length).fill(1);
    for (let dim = shape.length - 2; dim >= 0; dim--) strides[dim] = strides[dim + 1] * shape[dim + 1];
    return strides;
  }

  /* All ranks of a mesh, in row-major order of coordinates, each with its coordinate. */
  function ranksOf(mesh) {
    const found = [];
    const steps = rowMajor(mesh.sizes);
    for (let position = 0; position < product(mesh.sizes); position++) {
      const coordinate = mesh.sizes.map((size, axis) => Math.floor(position / steps[axis]) % size);
      const rank = mesh.table.length
        ? mesh.table[position]
        : mesh.offset + coordinate.reduce((sum, index, axis) => sum + index * mesh.strides[axis], 0);
      found.push({ rank, coordinate });
    }
    return found;
  }

  /* torch.chunk's rule. */
  function chunk(count, parts, index) {
    const step = Math.ceil(count / parts);
    return [Math.min(count, index * step), Math.min(count, (index + 1) * step)];
  }

  const length = (segments) => segments.reduce((sum, [lo, hi]) => sum + hi - lo, 0);

  /* The indices at positions [lo, hi) of the segments: [first, one past the last, position]. */
  function placed(segments, lo, hi) {
    const found = [];
    let at = 0;
    for (const [start, stop] of segments) {
      const a = Math.max(lo, at), b = Math.min(hi, at + stop - start);
      if (a < b) found.push([start + a - at, start + b - at, a]);
      at += stop - start;
    }
    return found;
  }

  function chunksOf(count, split) {
    if (split === 1 || count === 0) return [[0, count]];
    const step = Math.ceil(count / split), found = [];
    for (let first = 0; first < count; first += step) found.push([first, Math.min(count, first + step)]);
    return found;
  }

  function cut(segments, size, index, split) {
    const kept = [];
    for (const [first, last] of chunksOf(length(segments), split)) {
      const [lo, hi] = chunk(last - first, size, index);
      for (const [start, stop] of placed(segments, first + lo, first + hi)) {
        if (kept.length && kept[kept.length - 1][1] === start) kept[kept.length - 1][1] = stop;
        else kept.push([start, stop]);
      }
    }
    return kept;
  }

  /* The indices of each dimension that the cuts along dimensions leave a coordinate. */
  function segmentsAt(layout, coordinate) {
    const segments = layout.shape.map((size) => [[0, size]]);
    layout.placements.forEach(([kind, dim, split], axis) => {
      if (kind === "S" || kind === "SS") {
        segments[dim] = cut(segments[dim], layout.mesh.sizes[axis], coordinate[axis], kind === "SS" ? split : 1);
      }
    });
    return segments;
  }

  /* The elements [lo, hi) of the local array that the other placements leave a coordinate. */
  function spanAt(layout, coordinate, count) {
    let lo = 0, hi = count, part = 0, parts = 1;
    for (let axis = 0; axis < layout.placements.length; axis++) {
      const [kind, first, stride] = layout.placements[axis];
      const size = layout.mesh.sizes[axis], index = coordinate[axis];
      if (kind === "F") {
        const start = index * stride - first;
        const a = lo + Math.max(0, start), b = Math.min(hi, lo + start + stride);
        [lo, hi] = a < b ? [a, b] : [lo, lo];
      } else if (kind === "split") {
        part = part * size + index;
        parts *= size;
      } else if (kind === "only" && first !== index) {
        return [0, 0];
      }
    }
    const [a, b] = chunk(hi - lo, parts, part);
    return a < b ? [lo + a, lo + b] : [0, 0];
  }

  /* The boxes that form elements [lo, hi) of a row-major array, in order. */
  function spanBoxes(shape, lo, hi) {
    if (lo >= hi) return [];
    if (!shape.length) return [{ lo: [], hi: [] }];
    const rest = shape.slice(1), inner = product(rest), found = [];
    let first = Math.floor(lo / inner);
    const last = Math.floor((hi - 1) / inner);
    const row = (index, boxes) => {
      for (const box of boxes) found.push({ lo: [index, ...box.lo], hi: [index + 1, ...box.hi] });
    };
    if (first === last) {
      row(first, spanBoxes(rest, lo - first * inner, hi - first * inner));
      return found;
    }
    if (lo % inner) {
      row(first, spanBoxes(rest, lo - first * inner, inner));
      first += 1;
    }
    const whole = Math.floor(hi / inner);
    if (first < whole) found.push({ lo: [first, ...rest.map(() => 0)], hi: [whole, ...rest] });
    if (hi % inner) row(whole, spanBoxes(rest, 0, hi - whole * inner));
    return found;
  }

  /* The boxes that a coordinate holds, in the order of its local storage. */
  function boxesAt(layout, coordinate) {
    const segments = segmentsAt(layout, coordinate);
    const local = segments.map(length), count = product(local);
    const [lo, hi] = spanAt(layout, coordinate, count);
    if (lo >= hi) return [];
    const parts = hi - lo === count ? [{ lo: local.map(() => 0), hi: local }] : spanBoxes(local, lo, hi);
    const found = [];
    for (const part of parts) {
      let boxes = [{ lo: [], hi: [] }];
      segments.forEach((dim, axis) => {
        const ranges = placed(dim, part.lo[axis], part.hi[axis]);
        boxes = boxes.flatMap((box) => ranges.map(([a, b]) => ({ lo: [...box.lo, a], hi: [...box.hi, b] })));
      });
      found.push(...boxes);
    }
    return found;
  }

  /* All boxes of a layout: [{rank, box}], in the order of ranks. */
  function pieces(layout) {
    return ranksOf(layout.mesh)
      .sort((a, b) => a.rank - b.rank)
      .flatMap(({ rank, coordinate }) => boxesAt(layout, coordinate).map((box) => ({ rank, box })));
  }

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

  /* The layout of a job of `ranks` ranks: cut along `dim` by one axis, or replicated if it is null
   * or if the tensor lacks the dimension. */
  function jobLayout(shape, ranks, dim) {
    const mesh = { names: ["world"], sizes: [ranks], offset: 0, strides: [ranks > 1 ? 1 : 0], table: [] };
    const placement = dim === null || dim >= shape.length ? ["R"] : ["S", dim];
    return { shape, mesh, placements: [placement] };
  }

  return { boxesAt, indexed, jobLayout, numel, overlaps, pieces, product, ranksOf };
})();
if (typeof module !== "undefined") module.exports = ckptLayout;
