import { afterEach, describe, expect, test, vi } from "vitest";
import { CoppiceError, isCode } from "../src/errors.js";
import { NodeWire, unsent } from "../src/nodewire.js";
import type { Wire, WireRequest } from "../src/wire.js";
import { repeatAfter } from "../src/transport.js";
import { client, json, refuse, stream, TestServer, toBytes, wires, workspace, workspaceId } from "./support.js";

const operation = (more: Record<string, unknown>): Record<string, unknown> => ({ id: "op_1", kind: "create_workspace", state: "running", workspace_ids: [], timings: [], created_at: "", ...more });

afterEach(() => vi.restoreAllMocks());

/** later puts the clock forward, as if a computer had slept. */
function later(ms: number): void {
  const then = Date.now() + ms;
  vi.spyOn(Date, "now").mockReturnValue(then);
}

describe.each(wires)("calls over %s", (_, wire) => {
  test("a creation that lost its connection is repeated with the same key", async () => {
    await using server = await new TestServer((request, response) => {
      if (server.requests.length < 3) request.socket.destroy();
      else json(response, 201, workspace());
    }).start();
    const ws = await client(wire(), server.base).create("base");
    expect(ws.id).toBe(workspaceId);
    expect(server.requests).toHaveLength(3);
    expect(new Set(server.requests.map((r) => r.headers["idempotency-key"])).size).toBe(1);
    expect(server.requests[0]?.headers["idempotency-key"]).toMatch(/^ts-[0-9a-f]{32}$/);
    expect(server.requests[0]?.headers.authorization).toBe("Bearer secret");
  });

  test("a key of the caller is sent as it is", async () => {
    await using server = await new TestServer((_request, response) => json(response, 201, workspace())).start();
    await client(wire(), server.base).create("base", { idempotencyKey: "mine" });
    expect(server.requests[0]?.headers["idempotency-key"]).toBe("mine");
    expect(JSON.parse(server.requests[0]?.body ?? "")).toEqual({ image: "base" });
  });

  test("a call that could do something twice is not repeated", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.url?.includes("/signal")) request.socket.destroy();
      else json(response, 200, { id: "sess_1" });
    }).start();
    const session = await client(wire(), server.base).session("sess_1");
    await expect(session.signal("SIGTERM")).rejects.toMatchObject({ code: "CONNECTION_FAILED" });
    expect(server.requests.filter((r) => r.url.includes("/signal"))).toHaveLength(1);
  });

  test.each(["GUEST_UNREACHABLE", "STORE_UNAVAILABLE", "RUNNER_UNREACHABLE"])("a refusal %s is for the caller at once", async (code) => {
    await using server = await new TestServer((_request, response) => refuse(response, 503, code, {}, { "retry-after": "1" })).start();
    await expect(client(wire(), server.base).workspace(workspaceId)).rejects.toMatchObject({ code, status: 503, requestId: "req-1" });
    await expect(client(wire(), server.base).create("base")).rejects.toMatchObject({ code });
    expect(server.requests).toHaveLength(2);
  });

  test("an unreachable database is waited for", async () => {
    await using server = await new TestServer((_request, response) => {
      if (server.requests.length < 3) refuse(response, 503, "DATABASE_UNAVAILABLE");
      else json(response, 200, workspace());
    }).start();
    expect((await client(wire(), server.base).workspace(workspaceId)).name).toBe("demo");
  });

  test("tries are bounded", async () => {
    await using server = await new TestServer((_request, response) => refuse(response, 429, "RATE_LIMITED")).start();
    await expect(client(wire(), server.base).workspace(workspaceId)).rejects.toMatchObject({ code: "RATE_LIMITED" });
    expect(server.requests).toHaveLength(5);
  });

  test("a first try that still works is waited for beyond the number of tries", async () => {
    await using server = await new TestServer((_request, response) => {
      if (server.requests.length < 8) refuse(response, 409, "IDEMPOTENCY_IN_PROGRESS");
      else json(response, 201, workspace());
    }).start();
    await client(wire(), server.base).create("base");
    expect(server.requests).toHaveLength(8);
  });

  test("but not for ever", async () => {
    await using server = await new TestServer((_request, response) => refuse(response, 409, "IDEMPOTENCY_IN_PROGRESS")).start();
    await expect(client(wire(), server.base, 1).create("base")).rejects.toMatchObject({ code: "IDEMPOTENCY_IN_PROGRESS" });
    expect(server.requests.length).toBeLessThanOrEqual(6);
  });

  test("an operation of the first try is waited for", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "POST") refuse(response, 409, "IDEMPOTENCY_IN_PROGRESS", { operation_id: "op_1" });
      else if (server.requests.length < 4) json(response, 200, operation({}));
      else json(response, 200, operation({ state: "succeeded", result: workspace() }));
    }).start();
    expect((await client(wire(), server.base).create("base")).name).toBe("demo");
    expect(server.requests[1]?.url).toMatch(/^\/v1\/operations\/op_1/);
  });

  test.each([22, 23])("a creation is repeated with its key for less than 23 hours: after %i", async (hours) => {
    await using server = await new TestServer((request, response) => {
      if (server.requests.length > 1) {
        json(response, 201, workspace());
        return;
      }
      later(hours * 3_600_000);
      request.socket.destroy();
    }).start();
    const call = client(wire(), server.base).create("base");
    if (hours < 23) expect((await call).name).toBe("demo");
    else await expect(call).rejects.toMatchObject({ code: "CONNECTION_FAILED" });
    expect(server.requests).toHaveLength(hours < 23 ? 2 : 1);
  });

  test("an operation is waited for while its server restarts", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "POST") json(response, 202, operation({}));
      else if (server.requests.length < 9) request.socket.destroy();
      else json(response, 200, operation({ state: "succeeded", result: workspace() }));
    }).start();
    expect((await client(wire(), server.base).create("base")).name).toBe("demo");
  });

  test("but not for ever, and the error has the operation", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "POST") {
        json(response, 202, operation({}));
        return;
      }
      if (server.requests.length === 8) later(120_000);
      request.socket.destroy();
    }).start();
    await expect(client(wire(), server.base).create("base")).rejects.toMatchObject({ code: "CONNECTION_FAILED", operationId: "op_1" });
  });

  test("a body that breaks off is an error with a code", async () => {
    await using server = await new TestServer((request, response) => {
      if (!request.url?.includes("/files")) {
        json(response, 200, workspace());
        return;
      }
      response.writeHead(200, { "content-length": "1000" });
      response.write("x", () => response.destroy());
    }).start();
    const ws = await client(wire(), server.base).workspace(workspaceId);
    await expect(ws.files.read("/f")).rejects.toMatchObject({ name: "CoppiceError", code: "CONNECTION_FAILED" });
  });

  test("an operation that fails is an error with its code", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "POST") json(response, 202, operation({}));
      else json(response, 200, operation({ state: "failed", problem: { code: "CAPACITY", message: "full", recover_from: "ckpt_1" } }));
    }).start();
    await expect(client(wire(), server.base).create("base")).rejects.toMatchObject({ code: "CAPACITY", detail: "full", operationId: "op_1", recoverFrom: "ckpt_1" });
  });

  test("the wait for an operation is bounded", async () => {
    await using server = await new TestServer((request, response) => json(response, request.method === "POST" ? 202 : 200, operation({}))).start();
    await expect(client(wire(), server.base, 20).create("base")).rejects.toMatchObject({ code: "WAIT_TIMEOUT", operationId: "op_1" });
  });

  test("a redirection is never followed", async () => {
    await using server = await new TestServer((_request, response) => {
      response.writeHead(307, { location: "/elsewhere" });
      response.end();
    }).start();
    const error = await client(wire(), server.base).workspace(workspaceId).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(CoppiceError);
    expect(server.requests).toHaveLength(1);
  });

  test("a signal ends a call and the pauses between tries", async () => {
    const why = new Error("enough");
    const controller = new AbortController();
    await using server = await new TestServer(() => controller.abort(why)).start(); // it never answers
    await expect(client(wire(), server.base).workspace(workspaceId, { signal: controller.signal })).rejects.toBe(why);
    await using busy = await new TestServer((_request, response) => refuse(response, 429, "RATE_LIMITED", {}, { "retry-after": "20" })).start();
    const second = new AbortController();
    const call = client(wire(), busy.base).workspace(workspaceId, { signal: second.signal });
    setTimeout(() => second.abort(why), 20);
    await expect(call).rejects.toBe(why);
  });

  test("a server that is not there is an error without its address", async () => {
    const server = await new TestServer(() => undefined).start();
    await server[Symbol.asyncDispose]();
    const error = await client(wire(), server.base).ready().catch((e: unknown) => e);
    expect(isCode(error, "CONNECTION_FAILED")).toBe(true);
    expect((error as Error).message).not.toContain(server.base);
  });

  test("an answer that is cut short is read again", async () => {
    await using server = await new TestServer((_request, response) => {
      if (server.requests.length > 1) {
        json(response, 200, workspace());
        return;
      }
      response.writeHead(200, { "content-length": "1000" });
      response.write("{", () => response.destroy());
    }).start();
    expect((await client(wire(), server.base).workspace(workspaceId)).name).toBe("demo");
  });

  test("lists are read page by page", async () => {
    await using server = await new TestServer((request, response) => {
      const cursor = new URL(request.url ?? "", "http://x").searchParams.get("cursor");
      json(response, 200, cursor === null ? { items: [workspace({ name: "one" })], next_cursor: "a b&c" } : { items: [workspace({ name: cursor })] });
    }).start();
    const names: string[] = [];
    for await (const ws of client(wire(), server.base).workspaces({ labels: ["a=b", "c"], states: ["ready"] })) names.push(ws.name);
    expect(names).toEqual(["one", "a b&c"]);
    expect(server.requests[0]?.url).toContain("label=a%3Db&label=c&state=ready");
  });
});

test.each(["", ".", "..", undefined])("an id %j cannot lead to another route", async (id) => {
  const [, wire] = wires[0] ?? [];
  await expect(client((wire as () => never)(), "http://127.0.0.1:1").session(id as string)).rejects.toMatchObject({ code: "INVALID_ID" });
});

test("a slash in an id stays within it", async () => {
  await using server = await new TestServer((_request, response) => refuse(response, 404, "SESSION_NOT_FOUND")).start();
  const [, wire] = wires[0] ?? [];
  await expect(client((wire as () => never)(), server.base).session("../self?x#y")).rejects.toMatchObject({ code: "SESSION_NOT_FOUND" });
  expect(server.requests[0]?.url).toBe("/v1/sessions/..%2Fself%3Fx%23y");
});

test("what is repeated, and when", () => {
  const rate = (retryAfter?: number): CoppiceError => new CoppiceError("RATE_LIMITED", "", { retryAfter });
  expect([repeatAfter(rate(2), false, false), repeatAfter(rate(), false, false)]).toEqual([2000, 0]);
  expect(repeatAfter(rate(86400), true, true)).toBeUndefined();
  expect(repeatAfter(new CoppiceError("GUEST_UNREACHABLE", "", { retryAfter: 1 }), true, true)).toBeUndefined();
  expect(repeatAfter(new CoppiceError("HTTP_503", ""), false, false)).toBeUndefined();
  expect(repeatAfter(new CoppiceError("HTTP_503", ""), true, false)).toBe(0);
});

test.each([["3600", 3600], ["soon", undefined], ["-1", undefined], ["1e9", undefined], ["99999999999999999999", undefined]])("a Retry-After of %s", async (header, want) => {
  await using server = await new TestServer((_request, response) => refuse(response, 429, "QUOTA_EXCEEDED", {}, { "retry-after": header })).start();
  const [, wire] = wires[0] ?? [];
  await expect(client((wire as () => never)(), server.base).workspace(workspaceId)).rejects.toMatchObject({ code: "QUOTA_EXCEEDED", retryAfter: want });
});

test("a server that wants an hour gets no repetition", async () => {
  await using server = await new TestServer((_request, response) => refuse(response, 429, "RATE_LIMITED", {}, { "retry-after": "3600" })).start();
  const [, wire] = wires[0] ?? [];
  await expect(client((wire as () => never)(), server.base).create()).rejects.toMatchObject({ code: "RATE_LIMITED", retryAfter: 3600 });
  expect(server.requests).toHaveLength(1);
});

test("a deletion whose answer was lost has succeeded if the repetition finds nothing", async () => {
  await using server = await new TestServer((request, response) => {
    if (request.method === "GET") json(response, 200, { id: "ckpt_1" });
    else if (server.requests.filter((r) => r.method === "DELETE").length === 1) request.socket.destroy();
    else refuse(response, 404, "CHECKPOINT_NOT_FOUND");
  }).start();
  const [, wire] = wires[0] ?? [];
  const node = await client((wire as () => never)(), server.base).checkpoint("ckpt_1");
  expect(await node.delete()).toBeUndefined();
  await expect(node.delete()).rejects.toMatchObject({ code: "CHECKPOINT_NOT_FOUND" });
});

test.each(["", "<html>", "[1]", "null", "5"])("an answer %j is no answer of the server", async (text) => {
  await using server = await new TestServer((_request, response) => response.end(text)).start();
  const [, wire] = wires[0] ?? [];
  await expect(client((wire as () => never)(), server.base).workspace(workspaceId)).rejects.toMatchObject({ code: "INCOMPLETE" });
});

test("errors have a hint, also those of a newer server", () => {
  expect(new CoppiceError("WORKSPACE_NOT_FOUND", "no").hint).not.toBe("");
  for (const unknown of ["BRAND_NEW", "constructor", "__proto__"]) expect(new CoppiceError(unknown, "no").hint).toBe("");
});

test("a failed connect has sent nothing, and a connection that breaks later may have", () => {
  const error = (code: string, syscall?: string): NodeJS.ErrnoException => Object.assign(new Error(code), { code, syscall });
  for (const code of ["ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"]) {
    expect(unsent(error(code, "connect"))).toBe(true);
    expect(unsent(error(code, "read"))).toBe(false);
    expect(unsent(error(code))).toBe(false);
    expect(unsent(Object.assign(new AggregateError([error(code, "connect"), error("ECONNREFUSED", "connect")]), { code }))).toBe(true);
    expect(unsent(Object.assign(new AggregateError([error(code, "connect"), error(code, "read")]), { code }))).toBe(false);
  }
  expect([unsent(error("ECONNREFUSED", "connect")), unsent(error("ECONNRESET", "read"))]).toEqual([true, false]);
});

test("a server that says nothing ends a call with a limit", async () => {
  await using server = await new TestServer(() => undefined).start();
  const wire = new NodeWire();
  await expect(wire.send({ method: "GET", url: server.base, headers: {}, idleMs: 50 })).rejects.toMatchObject({ message: "the server was silent for too long", unsent: false });
  wire.close();
});

test("a body that stops ends a call with a limit", async () => {
  await using server = await new TestServer((_request, response) => void response.write("x")).start();
  const wire = new NodeWire();
  const answer = await wire.send({ method: "GET", url: server.base, headers: {}, idleMs: 5000 });
  await expect(toBytes(answer.body)).rejects.toMatchObject({ unsent: false });
  wire.close();
});

test("silence is limited for all calls but streams and programs", async () => {
  const sent: WireRequest[] = [];
  const answer = { ...workspace(), stdout: "", stderr: "" };
  const recorder: Wire = {
    send: (request) => {
      sent.push(request);
      return Promise.resolve({ status: 200, header: () => undefined, trailer: () => undefined, body: stream(JSON.stringify(answer)), cancel: () => undefined });
    },
    open: () => Promise.reject(new Error("no")),
    close: () => undefined,
  };
  const ws = await client(recorder, "http://x").workspace(workspaceId);
  await ws.run("true");
  await ws.exec("true");
  await ws.files.read("/f");
  await ws.files.write("/f", "x");
  expect(sent.map((r) => r.idleMs)).toEqual([90_000, undefined, 90_000, undefined, undefined]);
});

test("a WebSocket that cannot be opened is an error with a code", async () => {
  await using server = await new TestServer((request, response) => {
    json(response, 200, request.method === "POST" ? { transport: "websocket", url: "/v1/attach/x", token: "t", expires_at: "" } : { id: "sess_1" });
  }).start();
  server.server.on("upgrade", (_request, socket) => socket.destroy());
  const session = await client(new NodeWire(), server.base).session("sess_1");
  await expect(session.attach()).rejects.toMatchObject({ name: "CoppiceError", code: "CONNECTION_FAILED" });
});
