import { Away } from "./away.js";
import type { Context } from "./context.js";
import { CoppiceError, failure } from "./errors.js";
import type * as models from "./gen/models.js";
import { type CallOptions, keyLife, newKey } from "./transport.js";

/** The longest result of an action, most of which comes from a guest. */
const maxLine = 2 << 20;

/** How long a connection may be silent, in milliseconds. The server sends a line at least every 15 seconds. */
const maxSilence = 60_000;

/**
 * streamStep yields what the server says of a step, each once. When the connection breaks, it asks again with the same
 * key, and leaves out what it has yielded.
 */
export async function* streamStep(context: Context, id: models.CheckpointID, body: models.StepRequest, options: CallOptions): AsyncGenerator<models.StepEvent, void, void> {
  const call = {
    path: { checkpoint_id: id },
    body,
    headers: { accept: "application/x-ndjson" },
    idempotencyKey: options.idempotencyKey ?? newKey(),
    patient: false,
  };
  const away = new Away(options.signal);
  const first = Date.now();
  const had = new Set<number>();
  let begun = false;
  for (;;) {
    let ended = false;
    const silence = new AbortController();
    const signal = AbortSignal.any(options.signal ? [options.signal, silence.signal] : [silence.signal]);
    try {
      const answer = await context.transport.stream("stepCheckpoint", { ...call, signal });
      for await (const line of lines(heard(answer.body, silence))) {
        const event = eventOf(line);
        away.back();
        if (event.state === "failed") {
          ended = true;
          throw failure(event.problem ?? { code: "INTERNAL", message: `operation ${event.operation_id} failed` }, event.operation_id);
        }
        if (event.state !== undefined) return;
        if (event.action ? had.has(event.action.index) : begun) continue;
        begun = true;
        if (event.action) had.add(event.action.index);
        yield event;
      }
      throw new CoppiceError("CONNECTION_FAILED", "the results of the step broke off");
    } catch (error) {
      if (options.signal?.aborted) throw options.signal.reason;
      if (ended || Date.now() - first >= keyLife) throw error;
      await away.endure(error);
    }
  }
}

function eventOf(line: string): models.StepEvent {
  try {
    const event: unknown = JSON.parse(line);
    if (typeof event === "object" && event !== null && "operation_id" in event) return event as models.StepEvent;
  } catch (cause) {
    throw new CoppiceError("INCOMPLETE", "a result of the step is not JSON", { cause });
  }
  throw new CoppiceError("INCOMPLETE", "a result of the step has no operation");
}

/** heard passes on what arrives, and ends a transfer that is silent for too long. The time of the caller does not count. */
async function* heard(body: AsyncIterable<Uint8Array>, silence: AbortController): AsyncGenerator<Uint8Array, void, void> {
  const arm = (): ReturnType<typeof setTimeout> => setTimeout(() => silence.abort(new CoppiceError("CONNECTION_FAILED", "the results of the step fell silent")), maxSilence);
  let timer = arm();
  try {
    for await (const chunk of body) {
      clearTimeout(timer);
      yield chunk;
      timer = arm();
    }
  } finally {
    clearTimeout(timer);
  }
}

/** lines yields the whole lines of a body. What follows the last one did not arrive whole. */
async function* lines(body: AsyncIterable<Uint8Array>): AsyncGenerator<string, void, void> {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of body) {
    const parts = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = parts.pop() ?? "";
    if (Math.max(rest.length, ...parts.map((part) => part.length)) > maxLine) throw new CoppiceError("LIMIT_EXCEEDED", "a result of the step is too long");
    yield* parts;
  }
}
