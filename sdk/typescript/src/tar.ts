import { CoppiceError } from "./errors.js";

export type EntryType = "file" | "dir" | "symlink" | "link" | "other";

/** An entry of a tar. Read its body before you ask for the next entry, or not at all. */
export interface TarEntry {
  name: string;
  type: EntryType;
  mode: number;
  size: number;
  /** Seconds since 1970. */
  mtime: number;
  /** Target of a link. */
  target: string;
  body: AsyncIterable<Uint8Array>;
}

/** Bounds on an archive, which a guest controls. */
export interface TarLimits {
  /** Bytes of content, in all entries; default 10 GiB. */
  maxBytes?: number;
  /** Headers of every kind; default 1,000,000. */
  maxEntries?: number;
}

const block = 512;
const maxName = 8 << 10;
const maxPax = 64 << 10;
/** Bytes of all extended headers of one entry. */
const maxExtended = 1 << 20;
/** Digits of a decimal number. */
const maxDigits = 15;
/** What may follow the end mark: padding to the size of a record, generously. */
const maxPadding = 1 << 20;
export const defaultMaxBytes = 10 * 2 ** 30;
export const defaultMaxEntries = 1_000_000;

function invalid(what: string): CoppiceError {
  return new CoppiceError("INCOMPLETE", `the archive is not valid: ${what}`);
}

/** Reader takes bytes from chunks. */
class Reader {
  readonly #source: AsyncIterator<Uint8Array>;
  #chunk: Uint8Array = new Uint8Array(0);

  constructor(source: AsyncIterator<Uint8Array>) {
    this.#source = source;
  }

  /** some returns between one and most bytes; undefined at the end. */
  async some(most: number): Promise<Uint8Array | undefined> {
    while (this.#chunk.length === 0) {
      const { done, value } = await this.#source.next();
      if (done) return undefined;
      this.#chunk = value;
    }
    const out = this.#chunk.subarray(0, most);
    this.#chunk = this.#chunk.subarray(out.length);
    return out;
  }

  async exactly(size: number): Promise<Uint8Array> {
    const out = new Uint8Array(size);
    for (let at = 0; at < size; ) {
      const part = await this.some(size - at);
      if (!part) throw invalid("it ends in the middle");
      out.set(part, at);
      at += part.length;
    }
    return out;
  }
}

/**
 * readTar yields the entries of a tar (ustar, pax or GNU). Everything in it is bounded: the content, the number of
 * headers, names, link targets and extended headers. An archive without its end mark is an error.
 */
export async function* readTar(source: AsyncIterable<Uint8Array>, limits: TarLimits = {}): AsyncGenerator<TarEntry, void, void> {
  const maxBytes = limits.maxBytes ?? defaultMaxBytes;
  const maxEntries = limits.maxEntries ?? defaultMaxEntries;
  const iterator = source[Symbol.asyncIterator]();
  try {
    const reader = new Reader(iterator);
    let left = maxBytes;
    let extended: Extended = {};
    let extendedBytes = 0;
    let empty = 0;
    for (let entries = 0; ; ) {
      const header = await reader.exactly(block);
      if (header.every((b) => b === 0)) {
        if (++empty === 2) break;
        continue;
      }
      if (empty > 0) throw invalid("an empty block stands between entries");
      if (++entries > maxEntries) throw new CoppiceError("LIMIT_EXCEEDED", `the archive has more than ${maxEntries} entries`);
      checkSum(header);
      const flag = String.fromCharCode(header[156] ?? 0);
      const size = number(header, 124, 12);
      if ("xgLK".includes(flag)) {
        if (size > maxPax) throw new CoppiceError("LIMIT_EXCEEDED", `the archive has an extended header of ${size} bytes`);
        extendedBytes += size;
        if (extendedBytes > maxExtended) throw new CoppiceError("LIMIT_EXCEEDED", `the archive has more than ${maxExtended} bytes of extended headers for one entry`);
        const data = await reader.exactly(size);
        await reader.exactly(padding(size));
        if (flag === "x") pax(data, extended);
        else if (flag === "L") extended.path = text(data, 0, data.length);
        else if (flag === "K") extended.linkpath = text(data, 0, data.length);
        continue; // "g" is for all entries, and nothing in it is of use
      }
      const entry = entryOf(header, flag, size, extended);
      extended = {};
      extendedBytes = 0;
      if (entry.size > left) throw new CoppiceError("LIMIT_EXCEEDED", `the archive has more than ${maxBytes} bytes of content`);
      left -= entry.size;
      let unread = entry.size;
      const take = async (): Promise<Uint8Array | undefined> => {
        if (unread === 0) return undefined;
        const part = await reader.some(unread);
        if (!part) throw invalid("it ends in the middle");
        unread -= part.length;
        return part;
      };
      async function* body(): AsyncGenerator<Uint8Array, void, void> {
        for (let part = await take(); part; part = await take()) yield part;
      }
      yield { ...entry, body: body() };
      while (await take()); // what the reader left
      await reader.exactly(padding(entry.size));
    }
    let rest = 0;
    for (let part = await reader.some(maxPadding); part; part = await reader.some(maxPadding)) {
      rest += part.length;
      if (rest > maxPadding) throw invalid("there is more after its end");
    }
  } finally {
    await iterator.return?.();
  }
}

function padding(size: number): number {
  return (block - (size % block)) % block;
}

function entryOf(header: Uint8Array, flag: string, size: number, extended: Extended): Omit<TarEntry, "body"> {
  const ustar = text(header, 257, 5) === "ustar";
  const prefix = ustar && text(header, 257, 8) !== "ustar  " ? text(header, 345, 155) : "";
  const name = extended.path ?? (prefix ? `${prefix}/${text(header, 0, 100)}` : text(header, 0, 100));
  const target = extended.linkpath ?? text(header, 157, 100);
  if (name.length > maxName || target.length > maxName) throw new CoppiceError("LIMIT_EXCEEDED", "the archive has a name that is too long");
  if (name.includes("\0") || target.includes("\0")) throw invalid("a name has a zero byte");
  let type: EntryType = "other";
  if (flag === "0" || flag === "\0" || flag === "7") type = name.endsWith("/") ? "dir" : "file";
  else if (flag === "1") type = "link";
  else if (flag === "2") type = "symlink";
  else if (flag === "5") type = "dir";
  if (extended.sparse) type = "other";
  if (extended.size !== undefined) size = decimal(extended.size, "size");
  if (type === "link" || type === "symlink" || type === "dir") size = 0; // they have no content, whatever the header says
  const mtime = Number(extended.mtime ?? number(header, 136, 12));
  return { name, type, mode: number(header, 100, 8) & 0o7777, size, mtime: Number.isFinite(mtime) ? mtime : 0, target };
}

/** What is kept of the extended headers of one entry: nothing else of them has a use here. */
interface Extended {
  path?: string;
  linkpath?: string;
  size?: string;
  mtime?: string;
  /** The content is a sparse file in a form of GNU's. */
  sparse?: boolean;
  /** There was a header "x": an entry has at most one. */
  pax?: boolean;
}

/** pax reads the records of an extended header into out. */
function pax(data: Uint8Array, out: Extended): void {
  if (out.pax) throw invalid("an entry has two extended headers");
  out.pax = true;
  const decoder = new TextDecoder();
  for (let at = 0; at < data.length; ) {
    const space = data.subarray(at, at + maxDigits + 1).indexOf(0x20);
    const length = decimal(decoder.decode(data.subarray(at, at + Math.max(space, 0))), "the length of a record");
    const end = at + length;
    if (length <= space + 1 || end > data.length || data[end - 1] !== 0x0a) throw invalid("an extended header is broken");
    const record = decoder.decode(data.subarray(at + space + 1, end - 1));
    const equals = record.indexOf("=");
    if (equals < 1) throw invalid("an extended header is broken");
    const key = record.slice(0, equals);
    if (key === "path" || key === "linkpath" || key === "size" || key === "mtime") out[key] = record.slice(equals + 1);
    else if (key.startsWith("GNU.sparse")) out.sparse = true;
    at = end;
  }
}

function decimal(value: string, what: string): number {
  if (value.length > maxDigits || !/^\d+$/.test(value)) throw invalid(`${what} is not a number`);
  return Number(value);
}

/** text is a field up to its first zero byte. */
function text(data: Uint8Array, start: number, length: number): string {
  const field = data.subarray(start, start + length);
  const end = field.indexOf(0);
  return new TextDecoder().decode(end < 0 ? field : field.subarray(0, end));
}

/** number is a field in octal digits, or in GNU's binary form. */
function number(data: Uint8Array, start: number, length: number): number {
  const first = data[start] ?? 0;
  if (first & 0x80) {
    let value = first & 0x7f;
    for (let i = 1; i < length; i++) value = value * 256 + (data[start + i] ?? 0);
    if (!Number.isSafeInteger(value)) throw invalid("a number is too large");
    return value;
  }
  const digits = text(data, start, length).trim();
  if (digits === "") return 0;
  if (!/^[0-7]+$/.test(digits)) throw invalid("a number is not octal");
  return parseInt(digits, 8);
}

function checkSum(header: Uint8Array): void {
  let sum = 8 * 0x20;
  for (let i = 0; i < block; i++) if (i < 148 || i >= 156) sum += header[i] ?? 0;
  if (sum !== number(header, 148, 8)) throw invalid("the sum of a header is wrong");
}

/** What is written into a tar. */
export interface NewEntry {
  name: string;
  type?: "file" | "dir" | "symlink";
  mode?: number;
  mtime?: number;
  target?: string;
  /** The content of a file, or its size with chunks of exactly that many bytes. */
  data?: string | Uint8Array | { size: number; chunks: AsyncIterable<Uint8Array> };
}

/** writeTar yields a tar, owned by root. */
export async function* writeTar(entries: AsyncIterable<NewEntry> | Iterable<NewEntry>): AsyncGenerator<Uint8Array, void, void> {
  for await (const entry of entries) {
    const type = entry.type ?? "file";
    const data = typeof entry.data === "string" ? new TextEncoder().encode(entry.data) : (entry.data ?? new Uint8Array(0));
    const size = type !== "file" ? 0 : data instanceof Uint8Array ? data.length : data.size;
    const name = type === "dir" && !entry.name.endsWith("/") ? `${entry.name}/` : entry.name;
    yield* headers(name, type, entry.mode ?? (type === "dir" ? 0o755 : 0o644), size, entry.mtime ?? 0, entry.target ?? "");
    if (size === 0) continue;
    if (data instanceof Uint8Array) {
      yield data;
    } else {
      let left = size;
      for await (const chunk of data.chunks) {
        left -= chunk.length;
        if (left < 0) throw new CoppiceError("INCOMPLETE", `${entry.name} grew while it was read`);
        yield chunk;
      }
      if (left > 0) throw new CoppiceError("INCOMPLETE", `${entry.name} shrank while it was read`);
    }
    yield new Uint8Array(padding(size));
  }
  yield new Uint8Array(2 * block);
}

function* headers(name: string, type: "file" | "dir" | "symlink", mode: number, size: number, mtime: number, target: string): Generator<Uint8Array> {
  const encoder = new TextEncoder();
  const seconds = Math.max(0, Math.floor(mtime));
  const records: [string, string][] = [];
  if (encoder.encode(name).length > 100) records.push(["path", name]);
  if (encoder.encode(target).length > 100) records.push(["linkpath", target]);
  if (size >= 8 ** 11) records.push(["size", String(size)]);
  if (seconds >= 8 ** 11) records.push(["mtime", String(seconds)]);
  if (records.length > 0) {
    const body = encoder.encode(records.map(([key, value]) => record(key, value)).join(""));
    yield header("pax", "x", 0o644, body.length, 0, "");
    yield body;
    yield new Uint8Array(padding(body.length));
  }
  yield header(name, { file: "0", dir: "5", symlink: "2" }[type], mode, size < 8 ** 11 ? size : 0, seconds < 8 ** 11 ? seconds : 0, target);
}

/** record is one record of an extended header, which begins with its own length. */
function record(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`;
  const bytes = new TextEncoder().encode(rest).length;
  let length = bytes + String(bytes).length;
  length = bytes + String(length).length;
  return `${length}${rest}`;
}

function header(name: string, flag: string, mode: number, size: number, mtime: number, target: string): Uint8Array {
  const out = new Uint8Array(block);
  const encoder = new TextEncoder();
  const put = (at: number, length: number, value: string): void => out.set(encoder.encode(value).subarray(0, length), at);
  const octal = (at: number, length: number, value: number): void => put(at, length, value.toString(8).padStart(length - 1, "0"));
  put(0, 100, name);
  octal(100, 8, mode & 0o7777);
  octal(108, 8, 0);
  octal(116, 8, 0);
  octal(124, 12, size);
  octal(136, 12, mtime);
  put(156, 1, flag);
  put(157, 100, target);
  put(257, 8, "ustar\x0000");
  let sum = 8 * 0x20;
  for (const b of out) sum += b;
  put(148, 8, `${sum.toString(8).padStart(6, "0")}\0 `);
  return out;
}
