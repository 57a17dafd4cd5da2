import { Away } from "./away.js";
import { CoppiceError, failure, isCode, problem } from "./errors.js";
import type { Operation } from "./gen/models.js";
import { routes, type Operations, type Route } from "./gen/routes.js";
import { type Bytes, collect, connectionFailed, failing, LostError, pause, repeatable, type Socket, type Wire, type WireAnswer } from "./wire.js";

/** Options of every call. */
export interface CallOptions {
  /** Ends the call. What the call has started on the server goes on. */
  signal?: AbortSignal | undefined;
  /**
   * The key of a call that creates something, 1 to 255 printable ASCII characters. A program that has crashed may repeat
   * its call with the same key within a day, and gets the result of the first. By default each call has a key of its own.
   */
  idempotencyKey?: string | undefined;
}

export type Query = Record<string, string | number | boolean | readonly string[] | undefined>;

export interface Call<Name extends keyof Operations> extends CallOptions {
  path?: Operations[Name]["path"];
  query?: Operations[Name]["query"] & Query;
  body?: Operations[Name]["body"];
  /** Bytes that are sent unchanged, instead of JSON. */
  raw?: Bytes | undefined;
  headers?: Record<string, string>;
  /** The call is never repeated. */
  once?: boolean;
  /** The server may work for long without a word, so silence does not end the call. Bytes are always so, and streams by default. */
  patient?: boolean;
  /** For how long the client repeats a call whose first try the server still works on; default: the transport's. */
  waitLimitMs?: number;
}

/** The longest answer that is read into memory. */
const maxAnswer = 256 << 20;
const maxProblem = 1 << 20;

/** The number of times that a call is tried, and the pauses between the tries. */
const attempts = 5;
const firstPause = 50;
const maxPause = 5_000;
/** A server that wants a longer pause than this gets no repetition: the caller decides. */
const maxRetryAfter = 30_000;

/**
 * For how long a call is repeated with its key, by wall clock. The server forgets a key after 24 hours, and then a
 * repetition would do everything again.
 */
export const keyLife = 23 * 3_600_000;

/** How long the connection of a call may be silent. The server answers within a minute unless the work itself is long. */
const idleLimit = 90_000;

/** How long one request waits for an operation, in seconds; then the client asks again. */
const waitSeconds = 60;

export interface TransportConfig {
  /** The server's address without a slash at its end, such as https://coppice.example.com; for a path below it, too. */
  base: string;
  token?: string | undefined;
  /** Sent with every request where the runtime allows it. */
  userAgent?: string | undefined;
  /** For how long a call waits for an operation, or repeats a call that the server still works on. */
  waitLimitMs: number;
}

/** Transport makes the calls of the API and repeats those that failed without doing anything. */
export class Transport {
  readonly #wire: Wire;
  readonly #config: TransportConfig;

  constructor(wire: Wire, config: TransportConfig) {
    this.#wire = wire;
    this.#config = config;
  }

  close(): void {
    this.#wire.close();
  }

  /** call makes a call and returns the JSON of its answer. */
  async call<Name extends keyof Operations>(name: Name, call: Call<Name> = {}): Promise<Operations[Name]["result"]> {
    const { value } = await this.#json(name, call);
    return value as Operations[Name]["result"];
  }

  /** start makes a call that starts an operation, waits for the operation and returns its result. */
  async start<Name extends keyof Operations>(name: Name, call: Call<Name> = {}): Promise<Operations[Name]["result"]> {
    let operation: Operation;
    try {
      const query = { wait: waitSeconds, ...call.query } as Call<Name>["query"];
      const { status, value } = await this.#json(name, { ...call, query });
      if (status !== 202) return value as Operations[Name]["result"];
      operation = value as Operation;
    } catch (error) {
      // The server received an earlier try, and works on it.
      if (!isCode(error, "IDEMPOTENCY_IN_PROGRESS") || !error.operationId) throw error;
      operation = { id: error.operationId, state: "running" } as Operation; // waitOperation asks for the rest
    }
    operation = await this.waitOperation(operation, call);
    return operation.result as Operations[Name]["result"];
  }

  /** waitOperation waits for the end of an operation, and throws if it failed. */
  async waitOperation(operation: Operation, options: CallOptions & { waitLimitMs?: number } = {}): Promise<Operation> {
    const limit = options.waitLimitMs ?? this.#config.waitLimitMs;
    const deadline = Date.now() + limit;
    const away = new Away(options.signal);
    while (operation.state !== "succeeded") {
      if (operation.state === "failed") {
        const why = operation.problem ?? { code: "INTERNAL", message: `operation ${operation.id} failed` };
        throw failure(why, operation.id);
      }
      const left = deadline - Date.now();
      if (left <= 0) {
        throw new CoppiceError("WAIT_TIMEOUT", `operation ${operation.id} has not ended after ${limit} ms`, { operationId: operation.id });
      }
      const wait = Math.min(waitSeconds, Math.ceil(left / 1000));
      try {
        operation = await this.call("getOperation", { path: { operation_id: operation.id }, query: { wait }, signal: options.signal });
        away.back();
      } catch (error) {
        await away.endure(error).catch((final: unknown) => {
          throw ofOperation(final, operation.id);
        });
      }
    }
    return operation;
  }

  /** stream makes a call and returns its answer with the body unread. */
  async stream<Name extends keyof Operations>(name: Name, call: Call<Name> = {}): Promise<WireAnswer> {
    const answer = await this.#repeat(name, { patient: true, ...call }, (answer) => Promise.resolve(answer));
    return { ...answer, body: failing(name, answer.body) };
  }

  /** open opens a WebSocket at an address of this server. */
  async open(path: string, query: Query, signal?: AbortSignal): Promise<Socket> {
    const what = "the WebSocket";
    try {
      const socket = await this.#wire.open(this.#config.base + path + encode(query), signal);
      return {
        messages: failing(what, socket.messages),
        send: (data) =>
          socket.send(data).catch((error: unknown) => {
            throw connectionFailed(what, error);
          }),
        close: () => socket.close(),
      };
    } catch (error) {
      throw connectionFailed(what, error);
    }
  }

  #json<Name extends keyof Operations>(name: Name, call: Call<Name>): Promise<{ status: number; value: unknown }> {
    return this.#repeat(name, call, async (answer) => {
      const body = await collect(answer.body, maxAnswer, name);
      if (answer.status === 204) return { status: answer.status, value: undefined };
      let value: unknown;
      try {
        value = JSON.parse(new TextDecoder().decode(body));
      } catch (cause) {
        throw new CoppiceError("INCOMPLETE", `${name}: the answer is not JSON`, { status: answer.status, cause });
      }
      if (typeof value !== "object" || value === null || Array.isArray(value)) throw new CoppiceError("INCOMPLETE", `${name}: the answer is no object`, { status: answer.status });
      return { status: answer.status, value };
    });
  }

  async #repeat<Name extends keyof Operations, T>(name: Name, call: Call<Name>, read: (answer: WireAnswer) => Promise<T>): Promise<T> {
    const route: Route = routes[name];
    const key = route.keyed ? (call.idempotencyKey ?? newKey()) : undefined;
    const idempotent = key !== undefined || route.method === "GET" || route.method === "HEAD" || route.method === "DELETE";
    const once = call.once === true || !repeatable(call.raw);
    const first = Date.now();
    const deadline = first + (call.waitLimitMs ?? this.#config.waitLimitMs);
    let backoff = firstPause;
    let lost = false;
    for (let attempt = 1; ; attempt++) {
      let wait: number;
      let failed: unknown;
      try {
        const answer = await this.#try(name, route, call, key);
        if (answer.status < 300) return await read(answer);
        const refused = await refusal(name, answer);
        // The try whose answer was lost has deleted it.
        if (lost && route.method === "DELETE" && refused.status === 404 && refused.code.endsWith("_NOT_FOUND")) return await read(empty);
        const verdict = repeatAfter(refused, idempotent, key !== undefined);
        if (verdict === undefined || once) throw refused;
        // The server has the first try and works on it: that is no failed attempt, and only the time is bounded.
        if (refused.code === "IDEMPOTENCY_IN_PROGRESS" && Date.now() < deadline) attempt = 1;
        if (attempt >= attempts) throw refused;
        failed = refused;
        wait = verdict;
      } catch (error) {
        if (call.signal?.aborted) throw call.signal.reason;
        if (!(error instanceof LostError)) throw error;
        if (once || attempt >= attempts || !(error.unsent || idempotent)) {
          throw connectionFailed(name, error);
        }
        failed = connectionFailed(name, error);
        lost ||= !error.unsent;
        wait = 0;
      }
      await pause(Math.max(wait, backoff / 2 + Math.random() * backoff), call.signal);
      backoff = Math.min(2 * backoff, maxPause);
      if (key !== undefined && Date.now() - first >= keyLife) throw failed;
    }
  }

  #try<Name extends keyof Operations>(name: Name, route: Route, call: Call<Name>, key: string | undefined): Promise<WireAnswer> {
    const headers: Record<string, string> = { ...call.headers };
    let body: Bytes | undefined = call.raw;
    if (call.body !== undefined) {
      body = new TextEncoder().encode(JSON.stringify(call.body));
      headers["content-type"] = "application/json";
    } else if (body !== undefined && headers["content-type"] === undefined) {
      headers["content-type"] = "application/octet-stream";
    }
    if (key !== undefined) headers["idempotency-key"] = key;
    if (this.#config.token) headers["authorization"] = `Bearer ${this.#config.token}`;
    if (this.#config.userAgent) headers["user-agent"] = this.#config.userAgent;
    const url = this.#config.base + fill(name, route.path, call.path ?? {}) + encode(call.query ?? {});
    call.signal?.throwIfAborted();
    const idleMs = call.patient || call.raw !== undefined ? undefined : idleLimit;
    return this.#wire.send({ method: route.method, url, headers, body, signal: call.signal, idleMs });
  }
}

/** fill puts the parameters into a path. An id of a caller cannot lead to another route. */
function fill(name: string, path: string, values: Record<string, string>): string {
  return path.replace(/\{([a-z_]+)\}/g, (_, parameter: string) => {
    const value = values[parameter];
    if (typeof value !== "string" || value === "" || value === "." || value === "..") {
      throw new CoppiceError("INVALID_ID", `${name}: ${parameter} is ${JSON.stringify(value)}`);
    }
    return encodeURIComponent(value);
  });
}

export function encode(query: Query): string {
  const out = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === undefined) continue;
    if (Array.isArray(value)) {
      for (const item of value as readonly string[]) out.append(name, item);
    } else {
      out.append(name, String(value));
    }
  }
  const text = out.toString();
  return text && `?${text}`;
}

/** An answer without content. */
const empty: WireAnswer = {
  status: 204,
  header: () => undefined,
  trailer: () => undefined,
  body: {
    async *[Symbol.asyncIterator]() {
      // There is nothing.
    },
  },
  cancel: () => undefined,
};

async function refusal(name: string, answer: WireAnswer): Promise<CoppiceError> {
  if (answer.status < 400) {
    answer.cancel();
    return new CoppiceError(`HTTP_${answer.status}`, `${name}: the server redirects, and the client never follows: correct the address`, { status: answer.status });
  }
  const body = await collect(answer.body, maxProblem, name);
  return problem(name, answer.status, answer.header("x-request-id"), new TextDecoder().decode(body), seconds(answer.header("retry-after")));
}

/** seconds reads a Retry-After; anything but a number is none. */
function seconds(retryAfter: string | undefined): number | undefined {
  return /^\d{1,9}$/.test(retryAfter ?? "") ? Number(retryAfter) : undefined;
}

/**
 * repeatAfter says after how many milliseconds a refused call may be repeated; undefined: it may not. A refusal that
 * comes from a guest, or that a repetition cannot change, is for the caller.
 */
export function repeatAfter(refused: CoppiceError, idempotent: boolean, keyed: boolean): number | undefined {
  const wait = (refused.retryAfter ?? 0) * 1000;
  if (wait > maxRetryAfter) return undefined;
  switch (refused.code) {
    case "RATE_LIMITED": // refused before the server did anything
      return wait;
    case "IDEMPOTENCY_IN_PROGRESS": // with an operation, the client waits for that instead
      return keyed && !refused.operationId ? wait : undefined;
    case "DATABASE_UNAVAILABLE":
    case "CONTROLLER_STOPPING":
    case "HTTP_502": // of a proxy
    case "HTTP_503":
    case "HTTP_504":
      return idempotent ? wait : undefined;
    default:
      return undefined;
  }
}

/** ofOperation adds the operation to an error, so that its caller can wait for it again. */
function ofOperation(error: unknown, id: string): unknown {
  if (!(error instanceof CoppiceError) || error.operationId) return error;
  return new CoppiceError(error.code, `operation ${id}: ${error.detail}`, {
    status: error.status,
    fields: error.fields,
    operationId: id,
    cause: error,
    ...(error.requestId !== undefined && { requestId: error.requestId }),
    ...(error.retryAfter !== undefined && { retryAfter: error.retryAfter }),
  });
}

/** newKey makes an idempotency key. */
export function newKey(): string {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `ts-${Array.from(random, (b) => b.toString(16).padStart(2, "0")).join("")}`;
}
