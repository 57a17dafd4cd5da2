import type { Context } from "./context.js";
import { CoppiceError } from "./errors.js";
import type * as models from "./gen/models.js";
import type { CallOptions } from "./transport.js";
import { LostError, pause } from "./wire.js";

export interface EventFilter extends CallOptions {
  /** Id of the last known event; "0" begins with the oldest event that is kept. Default: from now on. */
  after?: string;
  /** Any checkpoint of the wanted tree. */
  tree?: models.CheckpointID;
  workspace?: models.WorkspaceID;
  /** Whole types, such as "workspace.ready", or objects, such as "checkpoint". */
  types?: string[];
  /** End after all past events, instead of following. */
  past?: boolean;
  /** Called once the stream has begun: every later event is in it. */
  onReady?: () => void;
}

/** The server sends something at least every 15 s. */
const silence = 50_000;
const reconnectPause = 1_000;
/** How many connections in a row may fail or end without a byte. */
const maxFailures = 600;
const maxLine = 1 << 20;

/**
 * events yields events, each once and in order, until the signal ends it. When the connection breaks, it connects again
 * with the id of the last event. EVENTS_EXPIRED ends it if it was away for longer than events are kept, and
 * CONNECTION_FAILED if 600 connections in a row brought nothing. A listing of past events must begin at the first try.
 */
export async function* events(context: Context, filter: EventFilter): AsyncGenerator<models.Event, void, void> {
  let last = filter.after;
  let onReady = filter.onReady;
  const query = { tree: filter.tree, workspace_id: filter.workspace, type: filter.types, follow: filter.past ? false : undefined };
  let begun = false;
  for (let failures = 0; ; ) {
    const quiet = new AbortController();
    let timer = setTimeout(() => quiet.abort(), silence);
    const watch = (): void => {
      failures = 0;
      clearTimeout(timer);
      timer = setTimeout(() => quiet.abort(), silence);
    };
    const aborted = (): void => quiet.abort(filter.signal?.reason);
    filter.signal?.addEventListener("abort", aborted, { once: true });
    try {
      filter.signal?.throwIfAborted();
      const headers: Record<string, string> = last === undefined ? {} : { "last-event-id": last };
      const answer = await context.transport.stream("streamEvents", { query, headers, signal: quiet.signal });
      begun = true;
      for await (const block of blocks(answer.body, watch)) {
        onReady?.();
        onReady = undefined;
        const event = block.data === "" ? undefined : (JSON.parse(block.data) as models.Event);
        if (block.id !== undefined) last = block.id;
        if (event) yield event;
      }
      if (filter.past) return;
      if (++failures >= maxFailures) throw new CoppiceError("CONNECTION_FAILED", `the events: ${failures} connections in a row brought nothing`);
    } catch (error) {
      if (filter.signal?.aborted) throw filter.signal.reason;
      const passing = quiet.signal.aborted || error instanceof LostError;
      if (!passing && !(error instanceof CoppiceError && (error.status >= 500 || error.status === 429 || error.code === "CONNECTION_FAILED"))) throw error;
      if (++failures >= maxFailures || (filter.past && !begun)) {
        throw error instanceof CoppiceError ? error : new CoppiceError("CONNECTION_FAILED", "the events: the server was silent for too long", { cause: error });
      }
    } finally {
      clearTimeout(timer);
      filter.signal?.removeEventListener("abort", aborted);
    }
    await pause(reconnectPause, filter.signal);
  }
}

/** blocks splits server-sent events. A block without data is a bare id. */
export async function* blocks(body: AsyncIterable<Uint8Array>, watch: () => void): AsyncGenerator<{ id: string | undefined; data: string }, void, void> {
  const decoder = new TextDecoder();
  let rest = "";
  let id: string | undefined;
  let data: string[] = [];
  let size = 0;
  for await (const chunk of body) {
    watch();
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (id !== undefined || data.length > 0) yield { id, data: data.join("\n") };
        [id, data, size] = [undefined, [], 0];
        continue;
      }
      const colon = line.indexOf(":");
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "id") id = value;
      if (name === "data") data.push(value);
      size += line.length;
      if (size > maxLine) throw new CoppiceError("LIMIT_EXCEEDED", "an event is too long");
    }
    if (rest.length > maxLine) throw new CoppiceError("LIMIT_EXCEEDED", "an event is too long");
  }
}
