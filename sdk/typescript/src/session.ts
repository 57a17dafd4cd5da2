import { Attachment } from "./attach.js";
import { Away } from "./away.js";
import { all, type Context } from "./context.js";
import { CoppiceError } from "./errors.js";
import type * as models from "./gen/models.js";
import type { CallOptions } from "./transport.js";
import { bytes, type Source } from "./wire.js";

export type Stream = "stdout" | "stderr";

/** A piece of output. */
export interface Output {
  stream: Stream;
  /** Position of the first byte in its stream. */
  offset: number;
  data: Uint8Array;
}

/** How a program ended. */
export interface Exit {
  /** 128 + signal if a signal ended it. */
  exitCode: number;
  /** The signal that ended it. */
  signal: string | undefined;
  timedOut: boolean;
}

const waitSeconds = 60;

/** The number of connections in a row that may end without a byte. Those that were never made count for Away. */
const idleConnections = 5;

/**
 * Session is a program that runs, or has run, in a workspace. It goes on when the client goes away. Iterate over it for
 * its output:
 *
 *     for await (const { stream, data } of session) …
 */
export class Session implements AsyncIterable<Output> {
  readonly #context: Context;
  #data: models.Session;

  constructor(context: Context, data: models.Session) {
    this.#context = context;
    this.#data = data;
  }

  get id(): models.SessionID {
    return this.#data.id;
  }

  /** What the server said last. */
  get data(): models.Session {
    return this.#data;
  }

  async refresh(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#get(0, options);
    return this;
  }

  /** wait returns when the program has ended. */
  async wait(options: CallOptions = {}): Promise<Exit> {
    const away = new Away(options.signal);
    while (this.#data.state !== "exited") {
      try {
        this.#data = await this.#get(waitSeconds, options);
        away.back();
      } catch (error) {
        await away.endure(error);
      }
      options.signal?.throwIfAborted();
    }
    return exitOf(this.#data);
  }

  [Symbol.asyncIterator](): AsyncGenerator<Output, void, void> {
    return this.output();
  }

  /**
   * output yields what the program writes, both streams as they come over one WebSocket, until it ends. After a lost
   * connection it connects again where it was. Output that the session no longer keeps is an error, OUTPUT_LOST.
   */
  async *output(options: { stdoutOffset?: number; stderrOffset?: number } & CallOptions = {}): AsyncGenerator<Output, void, void> {
    const next = { stdout: options.stdoutOffset ?? 0, stderr: options.stderrOffset ?? 0 };
    const away = new Away(options.signal);
    for (let idle = 0; ; ) {
      let established = false;
      try {
        const attachment = await this.attach({ stdoutOffset: next.stdout, stderrOffset: next.stderr, signal: options.signal });
        away.back();
        established = true;
        for await (const event of attachment) {
          if (event.type === "exit") {
            return;
          }
          if (event.type === "truncated") throw lost(this.id, event.stream, next[event.stream], event.to - next[event.stream]);
          if (event.type !== "output") continue;
          if (event.offset > next[event.stream]) throw lost(this.id, event.stream, next[event.stream], event.offset - next[event.stream]);
          const data = event.data.subarray(Math.min(next[event.stream] - event.offset, event.data.length));
          if (data.length === 0) continue;
          yield { stream: event.stream, offset: next[event.stream], data };
          next[event.stream] += data.length;
          idle = 0;
        }
      } catch (error) {
        options.signal?.throwIfAborted();
        await away.endure(error);
      }
      if (await this.#ended(next.stdout, next.stderr, away, options)) return;
      if (established && ++idle >= idleConnections) throw new CoppiceError("CONNECTION_FAILED", `session ${this.id}: the output broke off ${idle} times in a row`);
    }
  }

  /** stdout yields the bytes of one stream, from an offset until the program ends. */
  stdout(options: { offset?: number } & CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    return this.follow("stdout", options);
  }

  /** stderr is stdout for the other stream. With a terminal there is only stdout. */
  stderr(options: { offset?: number } & CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    return this.follow("stderr", options);
  }

  /** follow yields the bytes of one stream over HTTP. A reader that is slower than the program may lose output, which is an error. */
  async *follow(stream: Stream, options: { offset?: number } & CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    let offset = options.offset ?? 0;
    const away = new Away(options.signal);
    for (let idle = 0; ; ) {
      let established = false;
      try {
        const answer = await this.#context.transport.stream("getSessionOutput", {
          path: { session_id: this.id },
          query: { stream, offset, follow: true },
          signal: options.signal,
        });
        away.back();
        established = true;
        const at = Number(answer.header("coppice-offset") ?? offset);
        if (at > offset) {
          answer.cancel();
          throw lost(this.id, stream, offset, at - offset);
        }
        for await (const chunk of answer.body) {
          yield chunk;
          offset += chunk.length;
          idle = 0;
        }
        const eof = answer.trailer("coppice-eof");
        if (answer.trailer("coppice-truncated") === "true") throw lost(this.id, stream, offset, 0);
        if (eof === "true") return;
      } catch (error) {
        options.signal?.throwIfAborted();
        await away.endure(error);
      }
      const [out, err] = stream === "stdout" ? [offset, undefined] : [undefined, offset];
      if (await this.#ended(out, err, away, options)) return;
      if (established && ++idle >= idleConnections) throw new CoppiceError("CONNECTION_FAILED", `session ${this.id}: ${stream} broke off ${idle} times in a row at offset ${offset}`);
    }
  }

  /** write sends bytes to standard input. The session must have been started with `stdin`. Await each call before the next. */
  async write(data: Source, options: CallOptions = {}): Promise<void> {
    await this.#stdin(data, false, options);
  }

  /** closeStdin closes standard input, after the data if there is any. */
  async closeStdin(data: Source = "", options: CallOptions = {}): Promise<void> {
    await this.#stdin(data, true, options);
  }

  async #stdin(data: Source, close: boolean, options: CallOptions): Promise<void> {
    await this.#context.transport.call("writeSessionStdin", { path: { session_id: this.id }, query: { close }, raw: bytes(data), once: true, signal: options.signal });
  }

  /** signal sends a signal, such as SIGTERM, to the foreground processes. */
  async signal(signal: string, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("signalSession", { path: { session_id: this.id }, body: { signal }, signal: options.signal });
  }

  /** resize sets the size of the terminal. */
  async resize(cols: number, rows: number, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("resizeSession", { path: { session_id: this.id }, body: { cols, rows }, signal: options.signal });
  }

  /** setDeadline lets the server kill the session's processes after a time from now; 0 is never. */
  async setDeadline(timeoutMs: number, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("setSessionDeadline", { path: { session_id: this.id }, body: { timeout_ms: timeoutMs }, signal: options.signal });
  }

  /** kill kills the session's processes and forgets the session. */
  async kill(options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteSession", { path: { session_id: this.id }, ...options });
  }

  /** attach opens a connection in both directions, as a terminal needs it. It does not connect again by itself. */
  async attach(options: { stdoutOffset?: number; stderrOffset?: number } & CallOptions = {}): Promise<Attachment> {
    // Through the server: a browser can neither send the token of a runner's data plane nor trust its certificate.
    const grant = await this.#context.transport.call("attachSession", { path: { session_id: this.id }, query: { via: "controller" }, signal: options.signal });
    if (grant.transport !== "websocket") throw new CoppiceError("UNSUPPORTED", `session ${this.id}: the server offers the transport ${String(grant.transport)}`);
    const [path = "", search = ""] = grant.url.split("?", 2);
    if (!path.startsWith("/") || path.startsWith("//")) throw new CoppiceError("UNSUPPORTED", `session ${this.id}: the server sends the client elsewhere`);
    const query: Record<string, string | number> = { ...Object.fromEntries(new URLSearchParams(search)) };
    if (grant.token) query["token"] = grant.token;
    query["stdout_offset"] = options.stdoutOffset ?? 0;
    query["stderr_offset"] = options.stderrOffset ?? 0;
    return new Attachment(await this.#context.transport.open(path, query, options.signal));
  }

  #get(wait: number, options: CallOptions): Promise<models.Session> {
    return this.#context.transport.call("getSession", { path: { session_id: this.id }, query: wait > 0 ? { wait } : {}, signal: options.signal });
  }

  /** ended reports whether the program has ended and everything was read up to the offsets. */
  async #ended(stdout: number | undefined, stderr: number | undefined, away: Away, options: CallOptions): Promise<boolean> {
    try {
      this.#data = await this.#get(0, options);
    } catch (error) {
      options.signal?.throwIfAborted();
      await away.endure(error);
      return false;
    }
    if (this.#data.state !== "exited") return false;
    return (stdout === undefined || stdout >= this.#data.stdout_bytes) && (stderr === undefined || stderr >= this.#data.stderr_bytes);
  }
}

function exitOf(s: models.Session): Exit {
  return { exitCode: s.exit_code ?? -1, signal: s.signal, timedOut: s.timed_out };
}

function lost(id: string, stream: Stream, offset: number, count: number): CoppiceError {
  return new CoppiceError("OUTPUT_LOST", `session ${id}: ${count > 0 ? `${count} bytes` : "bytes"} of ${stream} from offset ${offset} are no longer kept`);
}

/** What run returns: the outcome of a program and the end of its output. */
export class RunResult implements Exit {
  readonly exitCode: number;
  readonly signal: string | undefined;
  readonly timedOut: boolean;
  /** The last MiB of each stream, as bytes. */
  readonly stdoutBytes: Uint8Array;
  readonly stderrBytes: Uint8Array;
  /** The beginning is missing. To get all of it, use exec and read the output as it comes. */
  readonly stdoutTruncated: boolean;
  readonly stderrTruncated: boolean;
  readonly data: models.ExecResult;

  constructor(data: models.ExecResult) {
    this.exitCode = data.exit_code;
    this.signal = data.signal;
    this.timedOut = data.timed_out;
    const decode = data.encoding === "base64" ? fromBase64 : (text: string) => new TextEncoder().encode(text);
    this.stdoutBytes = decode(data.stdout);
    this.stderrBytes = decode(data.stderr);
    this.stdoutTruncated = data.stdout_truncated;
    this.stderrTruncated = data.stderr_truncated;
    this.data = data;
  }

  get ok(): boolean {
    return this.exitCode === 0;
  }

  get stdout(): string {
    return new TextDecoder().decode(this.stdoutBytes);
  }

  get stderr(): string {
    return new TextDecoder().decode(this.stderrBytes);
  }

  /** check throws COMMAND_FAILED unless the program ended with 0. */
  check(): this {
    if (this.ok) return this;
    const why = this.timedOut ? "ran out of its time" : this.signal ? `was ended by ${this.signal}` : `ended with status ${this.exitCode}`;
    throw new CoppiceError("COMMAND_FAILED", `${this.data.session.command[0] ?? "the program"} ${why}: ${this.stderr.slice(-500)}`);
  }
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

export function toBase64(data: Uint8Array): string {
  let text = "";
  for (let at = 0; at < data.length; at += 0x8000) text += String.fromCharCode(...data.subarray(at, at + 0x8000));
  return btoa(text);
}

/** sessionsOf yields the sessions of a workspace. */
export async function* sessionsOf(context: Context, id: models.WorkspaceID, options: CallOptions): AsyncGenerator<Session, void, void> {
  for await (const data of all(context, "listSessions", { path: { workspace_id: id }, ...options })) yield new Session(context, data);
}

