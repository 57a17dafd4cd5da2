import type { Context } from "./context.js";
import { CoppiceError } from "./errors.js";
import type * as models from "./gen/models.js";
import type { CallOptions } from "./transport.js";

/** The longest line of a watch's events: a path and a few words. */
const maxLine = 128 << 10;

/** Watches tell what changes in directories of a workspace. */
export class Watches {
  readonly #context: Context;
  readonly #id: models.WorkspaceID;

  constructor(context: Context, id: models.WorkspaceID) {
    this.#context = context;
    this.#id = id;
  }

  /** create watches a directory for changes. */
  create(request: models.CreateWatchRequest, options: CallOptions = {}): Promise<models.Watch> {
    return this.#context.transport.call("createWatch", { path: { workspace_id: this.#id }, body: request, signal: options.signal });
  }

  /** list returns the watches, oldest first. */
  async list(options: CallOptions = {}): Promise<models.Watch[]> {
    return (await this.#context.transport.call("listWatches", { path: { workspace_id: this.#id }, signal: options.signal })).items;
  }

  async delete(id: models.WatchID, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteWatch", { path: { workspace_id: this.#id, watch_id: id }, signal: options.signal });
  }

  /**
   * events yields the events of a watch, with follow until the watch ends. It does not connect again by itself: after
   * CONNECTION_FAILED, call it with the `seq` of the last event as `after`. The guest controls the names.
   */
  async *events(id: models.WatchID, options: { after?: number; follow?: boolean } & CallOptions = {}): AsyncGenerator<models.WatchEvent, void, void> {
    const query = { after: options.after, follow: options.follow };
    const answer = await this.#context.transport.stream("getWatchEvents", { path: { workspace_id: this.#id, watch_id: id }, query, signal: options.signal });
    for await (const line of lines(answer.body)) {
      if (line !== "") yield eventOf(line);
    }
  }
}

function eventOf(line: string): models.WatchEvent {
  try {
    return JSON.parse(line) as models.WatchEvent;
  } catch (cause) {
    throw new CoppiceError("INCOMPLETE", "an event of a watch is not JSON", { cause });
  }
}

/** lines splits a body. A line without its end is one that did not arrive whole, and an error. */
async function* lines(body: AsyncIterable<Uint8Array>): AsyncGenerator<string, void, void> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of body) {
    const parts = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = parts.pop() ?? "";
    if (rest.length > maxLine) throw new CoppiceError("LIMIT_EXCEEDED", "an event of a watch is too long");
    yield* parts;
  }
  if (rest !== "") throw new CoppiceError("INCOMPLETE", "the last event of a watch is not whole");
}
