/**
 * Makes photos of phones fit a request: a server takes bodies of 4 MiB by default, and a chat sends all its images again
 * with each message.
 * @module
 */

const MAX_BYTES = 1_000_000;
const MAX_SIDE_PX = 2048;
const QUALITY = 0.9;
const READ_HERE = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp"];
/** Formats that the server reads. */

/**
 * The width and height of a picture within a square, in its own proportions.
 * @param {number} width
 * @param {number} height
 * @param {number} side of the square
 * @returns {[number, number]} at least 1, and not larger than the picture
 */
export function within(width, height, side) {
  const scale = Math.min(1, side / Math.max(width, height));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

/**
 * An image as JPEG, and smaller, if it is too large to send or in a format that the server does not read, such as HEIC.
 * @param {File} file
 * @returns {Promise<Blob>} the file itself if it is small, or if this browser can't decode it: the server says why not
 */
export async function smaller(file) {
  if (file.size <= MAX_BYTES && READ_HERE.includes(file.type)) return file;
  try {
    const bitmap = await createImageBitmap(file);
    const [width, height] = within(bitmap.width, bitmap.height, MAX_SIDE_PX);
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    if (!context) return file;
    context.fillStyle = "white"; // JPEG has no transparency; the server puts images over white, too
    context.fillRect(0, 0, width, height);
    context.drawImage(bitmap, 0, 0, width, height);
    bitmap.close();
    return (await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY))) ?? file;
  } catch {
    return file;
  }
}
