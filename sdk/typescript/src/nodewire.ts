import * as http from "node:http";
import * as https from "node:https";
import { WebSocket as NodeWebSocket } from "ws";
import { MessageQueue } from "./queue.js";
import { type Bytes, chunks, LostError, type Socket, type Wire, type WireAnswer, type WireRequest } from "./wire.js";

/** The longest message that is accepted, and how many bytes may wait before the connection is paused. */
const maxMessage = 16 << 20;
const maxWaiting = 1 << 20;

/** How long the client waits for the server's word that it wants a streamed body. */
const continueAfter = 5_000;

const unsentCodes = new Set(["ECONNREFUSED", "ENOENT", "ENOTFOUND", "EAI_AGAIN"]);
/** Codes of a failed connect, and also of a connection that breaks later, when the server may have the request. */
const connectCodes = new Set(["EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT"]);

/** unsent reports whether an error says that no connection was made. With several addresses all must have failed so. */
export function unsent(error: NodeJS.ErrnoException): boolean {
  if (error instanceof AggregateError) return error.errors.length > 0 && error.errors.every((e) => unsent(e as NodeJS.ErrnoException));
  const code = error.code ?? "";
  return unsentCodes.has(code) || (connectCodes.has(code) && (error.syscall === "connect" || error.syscall === "getaddrinfo"));
}

/** How often a WebSocket is asked for a sign of life. Without any until the next time, it counts as lost. */
const pingEvery = 20_000;

/**
 * NodeWire carries requests with node:http. Unlike fetch it reads trailers, sends streams as they come, waits for an
 * answer as long as that takes, and speaks over unix sockets.
 */
export class NodeWire implements Wire {
  readonly #socketPath: string | undefined;
  readonly #plain = new http.Agent({ keepAlive: true });
  readonly #secure = new https.Agent({ keepAlive: true });

  constructor(socketPath?: string) {
    this.#socketPath = socketPath;
  }

  send(request: WireRequest): Promise<WireAnswer> {
    const url = new URL(request.url);
    const secure = url.protocol === "https:";
    const streamed = request.body !== undefined && !(request.body instanceof Uint8Array);
    const headers: http.OutgoingHttpHeaders = { ...request.headers };
    if (request.body instanceof Uint8Array) headers["content-length"] = request.body.length;
    if (request.body instanceof Blob) headers["content-length"] = request.body.size;
    if (streamed) headers["expect"] = "100-continue";
    return new Promise((resolve, reject) => {
      const options: https.RequestOptions = { method: request.method, headers, agent: secure ? this.#secure : this.#plain };
      if (this.#socketPath) options.socketPath = this.#socketPath;
      if (request.signal) options.signal = request.signal;
      if (request.idleMs !== undefined) options.timeout = request.idleMs; // also while it connects
      const req = secure ? https.request(url, options) : http.request(url, options);
      let answered = false;
      if (request.idleMs !== undefined) req.on("timeout", () => req.destroy(new LostError("the server was silent for too long", req.socket?.connecting === true)));
      req.on("error", (error: NodeJS.ErrnoException) => {
        if (answered) return; // the body shows it
        reject(request.signal?.aborted ? (request.signal.reason as Error) : error instanceof LostError ? error : new LostError(plain(error), unsent(error), error));
      });
      req.on("response", (response) => {
        answered = true;
        resolve(answerOf(response, request.signal));
      });
      if (!streamed) {
        req.end(request.body);
        return;
      }
      sendBody(req, request.body as Bytes, () => answered).catch((error: unknown) => {
        if (answered) return; // the server does not want the rest
        reject(request.signal?.aborted ? (request.signal.reason as Error) : (error as Error));
        req.destroy();
      });
    });
  }

  async open(url: string, signal?: AbortSignal): Promise<Socket> {
    const address = new URL(url);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    signal?.throwIfAborted();
    const target = this.#socketPath ? `ws+unix://${this.#socketPath}:${address.pathname}${address.search}` : address;
    const socket = new NodeWebSocket(target, { maxPayload: maxMessage, perMessageDeflate: false, followRedirects: false, handshakeTimeout: 30_000 });
    return ready(socket, signal);
  }

  close(): void {
    this.#plain.destroy();
    this.#secure.destroy();
  }
}

/** plain is the text of an error without an address, which may have a password or a token in it. */
function plain(error: NodeJS.ErrnoException): string {
  return error.code ? `the connection failed: ${error.code}` : "the connection was lost";
}

/** sendBody sends a stream once the server wants it, or has not said that it does not. */
async function sendBody(req: http.ClientRequest, body: Bytes, answered: () => boolean): Promise<void> {
  req.flushHeaders();
  await first(req, ["continue", "response", "error", "close"], continueAfter);
  const source = body instanceof Blob ? chunks(body.stream()) : (body as AsyncIterable<Uint8Array>);
  for await (const chunk of source) {
    if (answered() || req.destroyed) break;
    if (!req.write(chunk)) await first(req, ["drain", "response", "error", "close"]);
  }
  if (!req.destroyed) req.end();
}

/** first waits for the first of some events, or for a time. */
function first(req: http.ClientRequest, events: string[], ms?: number): Promise<void> {
  return new Promise((resolve) => {
    const done = (): void => {
      clearTimeout(timer);
      for (const event of events) req.off(event, done);
      resolve();
    };
    const timer = ms === undefined ? undefined : setTimeout(done, ms);
    for (const event of events) req.on(event, done);
  });
}

function answerOf(response: http.IncomingMessage, signal?: AbortSignal): WireAnswer {
  const text = (value: string | string[] | undefined): string | undefined => (Array.isArray(value) ? value[0] : value);
  return {
    status: response.statusCode ?? 0,
    header: (name) => text(response.headers[name]),
    trailer: (name) => response.trailers[name],
    body: guarded(response, signal),
    cancel: () => response.destroy(),
  };
}

async function* guarded(response: http.IncomingMessage, signal?: AbortSignal): AsyncGenerator<Uint8Array, void, void> {
  try {
    yield* response as AsyncIterable<Uint8Array>;
    if (!response.complete) throw new LostError("the connection was lost", false);
  } catch (error) {
    throw signal?.aborted ? signal.reason : error instanceof LostError ? error : new LostError("the connection was lost", false, error);
  }
}

/**
 * keepAlive ends a connection that shows no sign of life for one to two intervals. It does not judge while the reader
 * holds the connection back, nor while the other side has messages of ours that it may not have read: a program that
 * does not read its input also delays the answer to a ping. sent is the number of messages that were sent.
 */
export function keepAlive(socket: NodeWebSocket, sent: () => number, dead: () => void, every = pingEvery): void {
  let alive = true;
  let read = 0; // how many of our messages were read: pings carry the number
  socket.on("message", () => (alive = true));
  socket.on("pong", (data) => {
    alive = true;
    const count = Number(data.toString("latin1"));
    if (count <= sent()) read = count;
  });
  const timer = setInterval(() => {
    if (socket.isPaused || socket.readyState !== NodeWebSocket.OPEN) {
      alive = true;
      return;
    }
    if (!alive && read === sent()) {
      dead();
      return;
    }
    alive = false;
    socket.ping(String(sent()), undefined, () => undefined); // its failure also closes the connection
  }, every);
  socket.on("close", () => clearInterval(timer));
}

function ready(socket: NodeWebSocket, signal?: AbortSignal): Promise<Socket> {
  const queue = new MessageQueue(Number.MAX_SAFE_INTEGER); // pausing bounds it
  return new Promise((resolve, reject) => {
    const aborted = (): void => {
      queue.fail(signal?.reason as Error);
      reject(signal?.reason as Error);
      socket.terminate();
    };
    signal?.addEventListener("abort", aborted, { once: true });
    const close = (): void => {
      signal?.removeEventListener("abort", aborted);
      queue.end();
      socket.close(1000);
      socket.resume(); // so that the other side's close arrives
    };
    queue.onTaken = (size) => {
      if (size < maxWaiting) socket.resume();
    };
    socket.on("message", (data, binary) => {
      const buffer = data as Buffer;
      queue.push(binary ? buffer : buffer.toString("utf8"));
      if (queue.size >= maxWaiting && socket.readyState === NodeWebSocket.OPEN) socket.pause();
    });
    socket.on("error", (error: NodeJS.ErrnoException) => {
      const lost = new LostError(plain(error), unsent(error), error);
      queue.fail(lost);
      reject(lost);
    });
    socket.on("close", (code) => {
      signal?.removeEventListener("abort", aborted);
      if (code === 1000) queue.end();
      else queue.fail(new LostError(`the WebSocket was closed with code ${code}`, false));
    });
    socket.on("open", () => {
      let count = 0;
      keepAlive(socket, () => count, () => {
        queue.fail(new LostError("the WebSocket was silent for too long", false));
        socket.terminate();
      });
      resolve({
        messages: queue.read(close),
        send: (data) => {
          count++;
          return new Promise((sent, failed) => socket.send(data, (error) => (error ? failed(new LostError(plain(error), false, error)) : sent())));
        },
        close,
      });
    });
  });
}

