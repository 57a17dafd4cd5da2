import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { Checkpoint } from "../src/checkpoint.js";
import { CoppiceError } from "../src/errors.js";
import type * as models from "../src/gen/models.js";
import { client, json, refuse, TestServer, wires } from "./support.js";

const checkpointId = "ckpt_00000000000000000000000000";

interface Case {
  name: string;
  key?: string;
  answers: { status?: number; problem?: string; lines?: string[]; part?: string; cut?: boolean }[];
  events: string[];
  error?: string;
  requests: number;
}

/** The table that all SDKs have in common; sdk/conformance/README.md says what its words mean. */
const table = JSON.parse(readFileSync(new URL("../../conformance/steps.json", import.meta.url), "utf8")) as Case[];

function shown(event: models.StepEvent): string {
  const action = event.action;
  if (!action) return event.operation_id;
  return [event.operation_id, action.index, action.kept, ...(action.problem ? [action.problem.code] : [])].join(" ");
}

describe.concurrent.each(wires)("steps over %s", (_, wire) => {
  test("the table is there", () => expect(table.length).toBeGreaterThanOrEqual(10));

  test.each(table)("$name", async (c) => {
    let n = 0;
    await using server = await new TestServer((request, response) => {
      if (request.method === "GET") {
        json(response, 200, { id: checkpointId, state: "captured" });
        return;
      }
      const answer = c.answers[Math.min(n++, c.answers.length - 1)];
      if (answer?.problem) {
        refuse(response, answer.status ?? 500, answer.problem);
        return;
      }
      response.writeHead(200, { "content-type": "application/x-ndjson" });
      const body = (answer?.lines ?? []).map((line) => `${line}\n`).join("") + (answer?.part ?? "");
      if (answer?.cut) response.write(body, () => setImmediate(() => response.destroy()));
      else response.end(body);
    }).start();
    const node: Checkpoint = await client(wire(), server.base).checkpoint(checkpointId);
    const seen: string[] = [];
    let code: string | undefined;
    try {
      for await (const event of node.streamStep([{ command: ["true"] }, { command: ["false"] }], { idempotencyKey: c.key })) seen.push(shown(event));
    } catch (error) {
      if (!(error instanceof CoppiceError)) throw error;
      code = error.code;
    }
    expect([seen, code]).toEqual([c.events, c.error]);
    const sent = server.requests.filter((r) => r.method === "POST");
    expect(sent).toHaveLength(c.requests);
    const keys = new Set(sent.map((r) => r.headers["idempotency-key"]));
    expect(keys.size).toBe(1);
    const [key] = keys;
    expect(key).toMatch(c.key ? /^mine$/ : /^ts-/);
    expect(sent[0]?.headers.accept).toBe("application/x-ndjson");
    expect(sent[0]?.url).toBe(`/v1/checkpoints/${checkpointId}/step`);
  });

  test("the signal ends the loop", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "GET") json(response, 200, { id: checkpointId, state: "captured" });
      else response.write('{"operation_id":"op_1"}\n'); // and nothing more
    }).start();
    const node = await client(wire(), server.base).checkpoint(checkpointId);
    const stop = new AbortController();
    const read = async (): Promise<void> => {
      for await (const event of node.streamStep([{ command: ["true"] }], { signal: stop.signal })) {
        expect(event.operation_id).toBe("op_1");
        stop.abort(new Error("enough"));
      }
    };
    await expect(read()).rejects.toThrow("enough");
  });
});
