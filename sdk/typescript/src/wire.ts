import { CoppiceError } from "./errors.js";

/** Bytes that are sent. An iterable is read once, so a call with one is never repeated. */
export type Bytes = Uint8Array | Blob | AsyncIterable<Uint8Array>;

/** How to identify a server whose certificate systems do not know. */
export interface Trust {
  authority: string;
  server_name: string;
}

export interface WireRequest {
  method: string;
  url: string;
  headers: Record<string, string>;
  body?: Bytes | undefined;
  signal?: AbortSignal | undefined;
  /** The connection may be silent for that long. Default: for ever. A wire over fetch has no such limit. */
  idleMs?: number | undefined;
}

export interface WireAnswer {
  status: number;
  /** A header, by its name in lower case. */
  header(name: string): string | undefined;
  /** A trailer, after the body; undefined if the wire cannot read trailers. */
  trailer(name: string): string | undefined;
  /** The body. Leaving its loop early ends the transfer. */
  body: AsyncIterable<Uint8Array>;
  /** Ends the transfer without reading the body. */
  cancel(): void;
}

/** Socket is an open WebSocket. */
export interface Socket {
  /** The messages, until the other side closes in an orderly way. A lost connection is an error. */
  messages: AsyncIterable<string | Uint8Array>;
  send(data: string | Uint8Array): Promise<void>;
  close(): void;
}

/** Wire carries requests. There is one for Node.js and one for everything that has fetch. */
export interface Wire {
  send(request: WireRequest): Promise<WireAnswer>;
  /** Opens a WebSocket at a URL of the scheme http or https. */
  open(url: string, signal?: AbortSignal): Promise<Socket>;
  close(): void;
}

/** LostError says that no complete answer arrived. */
export class LostError extends Error {
  /** Nothing of the request reached the server. */
  readonly unsent: boolean;

  constructor(message: string, unsent: boolean, cause?: unknown) {
    super(message, { cause });
    this.unsent = unsent;
  }
}

/** connectionFailed is what callers get instead of a LostError. Any other error stays as it is. */
export function connectionFailed(what: string, error: unknown): unknown {
  return error instanceof LostError ? new CoppiceError("CONNECTION_FAILED", `${what}: ${error.message}`, { cause: error }) : error;
}

/** failing passes on what an iterable yields, and its end by connectionFailed. */
export async function* failing<T>(what: string, source: AsyncIterable<T>): AsyncGenerator<T, void, void> {
  try {
    yield* source;
  } catch (error) {
    throw connectionFailed(what, error);
  }
}

/** collect reads a body into memory, at most limit bytes of it; more is an error. */
export async function collect(body: AsyncIterable<Uint8Array>, limit: number, what: string): Promise<Uint8Array> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of body) {
    size += chunk.length;
    if (size > limit) throw new CoppiceError("LIMIT_EXCEEDED", `${what}: it has more than ${limit} bytes`);
    chunks.push(chunk);
  }
  return join(chunks, size);
}

export function join(chunks: Uint8Array[], size: number): Uint8Array {
  const only = chunks[0];
  if (chunks.length === 1 && only) return only;
  const out = new Uint8Array(size);
  let at = 0;
  for (const chunk of chunks) {
    out.set(chunk, at);
    at += chunk.length;
  }
  return out;
}

/** chunks reads a stream. Leaving the loop early cancels it. */
export async function* chunks(stream: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array, void, void> {
  const reader = stream.getReader();
  let ended = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        ended = true;
        return;
      }
      yield value;
    }
  } catch (error) {
    ended = true; // a broken stream needs no cancelling
    throw error;
  } finally {
    if (!ended) await reader.cancel().catch(() => undefined);
    reader.releaseLock();
  }
}

/** What callers may pass where bytes are wanted. */
export type Source = string | Uint8Array | ArrayBuffer | Blob | ReadableStream<Uint8Array> | AsyncIterable<Uint8Array>;

/** bytes makes a source a body. */
export function bytes(source: Source): Bytes {
  if (typeof source === "string") return new TextEncoder().encode(source);
  if (source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (source instanceof Blob) return source;
  if (source instanceof ReadableStream) return chunks(source);
  return source;
}

/** repeatable reports whether a body can be sent a second time. */
export function repeatable(body: Bytes | undefined): boolean {
  return body === undefined || body instanceof Uint8Array || body instanceof Blob;
}

/** pause waits, or throws the reason of the signal. */
export function pause(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) {
      reject(signal.reason as Error);
      return;
    }
    const aborted = (): void => {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, ms);
    signal?.addEventListener("abort", aborted, { once: true });
  });
}
