import { readFileSync } from "node:fs";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Wire, WireAnswer, WireRequest } from "../src/wire.js";
import { client } from "./support.js";

const checkpointId = "ckpt_00000000000000000000000000";

interface Case {
  name: string;
  apart?: boolean;
  answers: { lines: string[]; cut?: boolean }[];
  events: string[];
  requests: number;
}

const table = (JSON.parse(readFileSync(new URL("../../conformance/steps.json", import.meta.url), "utf8")) as Case[]).filter((c) => c.apart);

/** A wire whose answers to steps a test writes. The signal of the request ends them. */
class TestWire implements Wire {
  requests = 0;
  readonly #answer: (n: number) => AsyncIterable<string>;

  constructor(answer: (n: number) => AsyncIterable<string>) {
    this.#answer = answer;
  }

  async send(request: WireRequest): Promise<WireAnswer> {
    const lines = request.method === "GET" ? once(JSON.stringify({ id: checkpointId, state: "captured" })) : this.#answer(this.requests++);
    return { status: 200, header: () => undefined, trailer: () => undefined, body: ending(lines, request.signal), cancel: () => undefined };
  }

  open(): never {
    throw new Error("not here");
  }

  close(): void {
    // There is nothing.
  }
}

async function* once(text: string): AsyncGenerator<string, void, void> {
  yield text;
}

async function* ending(lines: AsyncIterable<string>, signal?: AbortSignal): AsyncGenerator<Uint8Array, void, void> {
  const ended = new Promise<never>((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason as Error)));
  ended.catch(() => undefined);
  const iterator = lines[Symbol.asyncIterator]();
  for (;;) {
    const next = await Promise.race([iterator.next(), ended]);
    if (next.done) return;
    yield new TextEncoder().encode(`${next.value}\n`);
  }
}

async function stepOver(wire: Wire, each: () => Promise<void> = () => Promise.resolve()): Promise<string[]> {
  const seen: string[] = [];
  const read = async (): Promise<void> => {
    const node = await client(wire, "http://test").checkpoint(checkpointId);
    for await (const { operation_id, action } of node.streamStep([{ command: ["true"] }, { command: ["false"] }])) {
      seen.push(action ? `${operation_id} ${action.index} ${action.kept}` : operation_id);
      await each();
    }
  };
  const done = read();
  done.catch(() => undefined); // it is awaited below
  await vi.advanceTimersByTimeAsync(30 * 60_000);
  await done;
  return seen;
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

test("the table has cases whose breaks are far apart", () => expect(table.length).toBeGreaterThan(0));

test.each(table)("$name, because connections fall silent", async (c) => {
  const wire = new TestWire(async function* (n) {
    const answer = c.answers[n];
    yield* answer?.lines ?? [];
    if (answer?.cut) await new Promise(() => undefined);
  });
  expect(await stepOver(wire)).toEqual(c.events);
  expect(wire.requests).toBe(c.requests);
});

test("signs of life keep a connection, however long no action ends, and however long the caller takes", async () => {
  const wire = new TestWire(async function* () {
    for (let i = 0; i < 40; i++) {
      yield '{"operation_id":"op_1"}';
      await new Promise((resolve) => setTimeout(resolve, 15_000));
    }
    yield '{"operation_id":"op_1","state":"succeeded"}';
  });
  expect(await stepOver(wire, () => new Promise((resolve) => setTimeout(resolve, 5 * 60_000)))).toEqual(["op_1"]);
  expect(wire.requests).toBe(1);
});
