import { CoppiceError } from "./errors.js";
import { MessageQueue } from "./queue.js";
import { type Bytes, chunks, collect, LostError, type Socket, type Wire, type WireAnswer, type WireRequest } from "./wire.js";

/** The longest stream that is held in memory to be sent, because browsers cannot send streams over HTTP/1. */
const maxHeld = 256 << 20;

/** FetchWire carries requests with fetch and WebSocket. It reads no trailers. */
export class FetchWire implements Wire {
  readonly #fetch: typeof fetch;

  constructor(custom?: typeof fetch) {
    this.#fetch = custom ?? ((...args) => fetch(...args));
  }

  async send(request: WireRequest): Promise<WireAnswer> {
    let response: Response;
    const init: RequestInit = { method: request.method, headers: request.headers, redirect: "manual", cache: "no-store", credentials: "omit" };
    if (request.body !== undefined) init.body = await whole(request.body);
    if (request.signal) init.signal = request.signal;
    try {
      response = await this.#fetch(request.url, init);
    } catch (error) {
      throw request.signal?.aborted ? request.signal.reason : new LostError("no answer arrived", false, error);
    }
    const body = response.body;
    return {
      status: response.status || 302, // a browser shows a redirection as status 0
      header: (name) => response.headers.get(name) ?? undefined,
      trailer: () => undefined,
      body: body ? guarded(chunks(body), request.signal) : nothing(),
      cancel: () => void body?.cancel().catch(() => undefined),
    };
  }

  open(url: string, signal?: AbortSignal): Promise<Socket> {
    return openWebSocket(url, signal);
  }

  close(): void {
    // fetch has no connections of this client's own.
  }
}

async function whole(body: Bytes): Promise<BodyInit> {
  if (body instanceof Blob) return body;
  const held = body instanceof Uint8Array ? body : await collect(body, maxHeld, "send a stream with fetch, which holds it in memory; pass a Blob instead");
  return held as Uint8Array<ArrayBuffer>;
}

async function* nothing(): AsyncGenerator<Uint8Array, void, void> {
  // An answer without a body.
}

async function* guarded(body: AsyncIterable<Uint8Array>, signal?: AbortSignal): AsyncGenerator<Uint8Array, void, void> {
  try {
    yield* body;
  } catch (error) {
    throw signal?.aborted ? signal.reason : new LostError("the connection was lost", false, error);
  }
}

/** The most bytes of received messages that wait for their reader: a WebSocket of a browser cannot be paused. */
const maxWaiting = 64 << 20;

/** openWebSocket opens a WebSocket of the runtime. */
export function openWebSocket(url: string, signal?: AbortSignal): Promise<Socket> {
  if (typeof WebSocket === "undefined") throw new CoppiceError("NOT_HERE", "this runtime has no WebSocket");
  const address = new URL(url, (globalThis as { location?: Location }).location?.href);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(address);
    socket.binaryType = "arraybuffer";
    const queue = new MessageQueue(maxWaiting);
    let opened = false;
    const aborted = (): void => {
      queue.fail(signal?.reason as Error);
      socket.close();
      reject(signal?.reason as Error);
    };
    const close = (): void => {
      signal?.removeEventListener("abort", aborted);
      queue.end();
      socket.close();
    };
    signal?.addEventListener("abort", aborted, { once: true });
    if (signal?.aborted) {
      aborted();
      return;
    }
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => {
      const fits = queue.push(typeof event.data === "string" ? event.data : new Uint8Array(event.data));
      if (!fits) {
        queue.fail(new LostError("the messages were not read fast enough", false));
        socket.close();
      }
    };
    socket.onclose = (event) => {
      signal?.removeEventListener("abort", aborted);
      if (!opened) reject(new LostError("the WebSocket could not be opened", false)); // why, a browser does not say
      else if (event.code === 1000) queue.end();
      else queue.fail(new LostError(`the WebSocket was closed with code ${event.code}`, false));
    };
    socket.onopen = () => {
      opened = true;
      resolve({
        messages: queue.read(close),
        send: async (data) => {
          if (socket.readyState !== WebSocket.OPEN) throw new LostError("the WebSocket is closed", true);
          socket.send(data as string | Uint8Array<ArrayBuffer>);
          while (socket.readyState === WebSocket.OPEN && socket.bufferedAmount > 1 << 20) await new Promise((done) => setTimeout(done, 10));
        },
        close,
      });
    };
  });
}
