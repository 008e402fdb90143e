/**
 * Numbers as text. A number and its unit stay on one line.
 * @module
 */

const UNIT = "\u00a0"; // a space that does not break

/**
 * @param {number} ms
 * @returns {string} such as "0.42 ms", "18 ms", "1.3 s"
 */
export function duration(ms) {
  if (ms < 0.005) return `0${UNIT}ms`;
  if (ms < 1) return `${ms.toFixed(2)}${UNIT}ms`;
  if (ms < 10) return `${ms.toFixed(1)}${UNIT}ms`;
  if (ms < 1000) return `${Math.round(ms)}${UNIT}ms`;
  if (ms < 100_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)}${UNIT}s`;
  return uptime(ms / 1000);
}

/**
 * @param {number} seconds
 * @returns {string} such as "42 s", "3 min 7 s", "5 h 12 min", "9 days"
 */
export function uptime(seconds) {
  const whole = Math.floor(seconds);
  const minutes = Math.floor(whole / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${whole}${UNIT}s`;
  if (hours < 1) return `${minutes}${UNIT}min ${whole % 60}${UNIT}s`;
  return hours < 48 ? `${hours}${UNIT}h ${minutes % 60}${UNIT}min` : `${Math.floor(hours / 24)}${UNIT}days`;
}

/**
 * @param {number} count
 * @returns {string} such as "1,456"
 */
export function whole(count) {
  return count.toLocaleString("en");
}

/**
 * @param {number | null} value
 * @returns {string} with as many digits as matter; "–" for null
 */
export function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 10) return value.toFixed(1);
  return whole(Math.round(value));
}

/**
 * @param {number | null} share from 0 to 1
 * @returns {string}
 */
export function percent(share) {
  if (share === null || Number.isNaN(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.01) return `< 0.01${UNIT}%`;
  if (value > 0 && value < 10) return `${value.toFixed(value < 1 ? 2 : 1)}${UNIT}%`;
  return `${value > 99 && value < 100 ? value.toFixed(1) : Math.round(value)}${UNIT}%`;
}

/**
 * @param {number} bytes
 * @returns {string}
 */
export function size(bytes) {
  if (bytes < 1024) return `${bytes}${UNIT}B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = bytes / 1024;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)}${UNIT}${units[unit]}`;
}

/**
 * @param {number} count
 * @param {string} noun
 * @returns {string} such as "1 token", "2 tokens"
 */
export function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}
