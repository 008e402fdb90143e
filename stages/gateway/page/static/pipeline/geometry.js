/**
 * Lines between boxes. Pure.
 * @module
 */

/**
 * @typedef {{left: number, top: number, right: number, bottom: number}} Box
 * @typedef {{x: number, y: number}} Point
 */

const GAP = 3;
const ARROW = 5;

/**
 * The corners of a line from a box to another: straight if they are beside or above each other, else with one bend.
 * @param {Box} from
 * @param {Box} to
 * @param {number} offset to the side, so that two directions have two lines
 * @param {"down first" | "across first"} bend
 * @returns {Point[]}
 */
export function line(from, to, offset, bend) {
  const x = overlap(from.left, from.right, to.left, to.right);
  const y = overlap(from.top, from.bottom, to.top, to.bottom);
  if (y !== null) {
    const isRight = to.left >= from.right;
    return [
      { x: isRight ? from.right + GAP : from.left - GAP, y: y + offset },
      { x: isRight ? to.left - GAP : to.right + GAP, y: y + offset },
    ];
  }
  const isBelow = to.top >= from.bottom;
  if (x !== null) {
    return [
      { x: x + offset, y: isBelow ? from.bottom + GAP : from.top - GAP },
      { x: x + offset, y: isBelow ? to.top - GAP : to.bottom + GAP },
    ];
  }
  const isRight = to.left >= from.right;
  if (bend === "down first") {
    const at = (from.left + from.right) / 2 + offset;
    const end = { x: isRight ? to.left - GAP : to.right + GAP, y: (to.top + to.bottom) / 2 };
    return [{ x: at, y: isBelow ? from.bottom + GAP : from.top - GAP }, { x: at, y: end.y }, end];
  }
  const end = { x: (to.left + to.right) / 2 + offset, y: isBelow ? to.top - GAP : to.bottom + GAP };
  const y0 = (from.top + from.bottom) / 2;
  return [{ x: isRight ? from.right + GAP : from.left - GAP, y: y0 }, { x: end.x, y: y0 }, end];
}

/**
 * The middle of what two ranges share; null if they share next to nothing.
 * @param {number} a0
 * @param {number} a1
 * @param {number} b0
 * @param {number} b1
 */
function overlap(a0, a1, b0, b1) {
  const begin = Math.max(a0, b0);
  const end = Math.min(a1, b1);
  return end - begin > 16 ? (begin + end) / 2 : null;
}

/**
 * @param {Point[]} points
 * @returns {string} the line as SVG path data
 */
export function pathData(points) {
  return points.map(({ x, y }, place) => `${place ? "L" : "M"}${x} ${y}`).join("");
}

/**
 * @param {Point[]} points
 * @returns {string} the arrow at the line's end
 */
export function arrowData(points) {
  const [last, before] = [points[points.length - 1], points[points.length - 2]];
  const dx = Math.sign(last.x - before.x);
  const dy = Math.sign(last.y - before.y);
  const back = { x: last.x - dx * ARROW, y: last.y - dy * ARROW };
  return `M${back.x - dy * ARROW} ${back.y - dx * ARROW}L${last.x} ${last.y}L${back.x + dy * ARROW} ${back.y + dx * ARROW}`;
}

/**
 * The point at a share of a line's length.
 * @param {Point[]} points
 * @param {number} share from 0 to 1
 * @returns {Point}
 */
export function pointAt(points, share) {
  let left = share * lengthOf(points);
  for (let i = 1; i < points.length; i += 1) {
    const [a, b] = [points[i - 1], points[i]];
    const part = Math.hypot(b.x - a.x, b.y - a.y);
    if (left <= part && part > 0) return { x: a.x + ((b.x - a.x) * left) / part, y: a.y + ((b.y - a.y) * left) / part };
    left -= part;
  }
  return points[points.length - 1];
}

/** @param {Point[]} points */
export function lengthOf(points) {
  let sum = 0;
  for (let i = 1; i < points.length; i += 1)
    sum += Math.hypot(points[i].x - points[i - 1].x, points[i].y - points[i - 1].y);
  return sum;
}
