// Checks the counts in MessagePack before it is decoded: the decoder reserves room for all items of an array that its first
// bytes announce, so arrays of arrays in 200 bytes would take all memory.

const [STRING, ARRAY, MAP] = [0xd9, 0xdc, 0xde];
/** What follows the byte of a type without a length, from 0xc0 on. */
const FIXED = [0, 0, 0, 0, -1, -1, -1, -1, -1, -1, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17];

/** Throws Error where arrays and maps have more items than the bytes can hold. */
export function checkItems(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  let [at, left, numItems] = [0, 1, 1];
  const length = (size) => {
    const value = size === 1 ? view.getUint8(at) : size === 2 ? view.getUint16(at) : view.getUint32(at);
    at += size;
    return value;
  };
  const skip = (size, more = 0) => {
    const num = length(size);
    at += num + more;
  };
  const open = (num) => {
    left += num;
    numItems += num;
    if (numItems > data.byteLength) throw new Error(`it has ${data.byteLength} bytes, and more items`);
  };
  for (; left; left -= 1) {
    const byte = view.getUint8(at);
    at += 1;
    if (byte < 0x80 || byte >= 0xe0) continue;
    if (byte < 0x90) open(2 * (byte & 15));
    else if (byte < 0xa0) open(byte & 15);
    else if (byte < 0xc0) at += byte & 31;
    else if (byte >= MAP) open(2 * length(byte === MAP ? 2 : 4));
    else if (byte >= ARRAY) open(length(byte === ARRAY ? 2 : 4));
    else if (byte >= STRING) skip(1 << (byte - STRING));
    else if (FIXED[byte - 0xc0] >= 0) at += FIXED[byte - 0xc0];
    else if (byte < 0xc7) skip(1 << (byte - 0xc4));
    else skip(1 << (byte - 0xc7), 1);
  }
}
