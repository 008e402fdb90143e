/**
 * Numbers as text.
 * @module
 */

/**
 * @param {number} ms
 * @returns {string} such as "0.42 ms", "18 ms", "1.3 s"
 */
export function duration(ms) {
  if (ms < 0.005) return "0 ms";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 100_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.round((ms % 60_000) / 1000)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/**
 * @param {number | null} value
 * @returns {string} with as many digits as matter; "–" for null
 */
export function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 10) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

/**
 * @param {number | null} share from 0 to 1
 * @returns {string}
 */
export function percent(share) {
  if (share === null || Number.isNaN(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  if (value > 0 && value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} %`;
  return `${value > 99 && value < 100 ? value.toFixed(1) : Math.round(value)} %`;
}

/**
 * @param {number} bytes
 * @returns {string}
 */
export function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = bytes / 1024;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/**
 * @param {number} count
 * @param {string} noun
 * @returns {string} such as "1 token", "2 tokens"
 */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
