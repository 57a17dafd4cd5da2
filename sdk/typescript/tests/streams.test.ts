import type { Duplex } from "node:stream";
import type { IncomingMessage } from "node:http";
import { createHash, randomBytes } from "node:crypto";
import { afterEach, describe, expect, test, vi } from "vitest";
import { WebSocket, WebSocketServer } from "ws";
import type { Context } from "../src/context.js";
import { CoppiceError } from "../src/errors.js";
import { blocks, events } from "../src/events.js";
import { checked } from "../src/export.js";
import { keepAlive } from "../src/nodewire.js";
import { MessageQueue } from "../src/queue.js";
import { RunResult, toBase64 } from "../src/session.js";
import type * as models from "../src/gen/models.js";
import { client, json, refuse, session, sessionId, stream, TestServer, toArray, toBytes, wires, workspaceId } from "./support.js";

const servers: WebSocketServer[] = [];
afterEach(() => {
  for (const server of servers.splice(0)) server.close();
});

/** attachable lets a test script each connection to a session; now is what the server says about the session. */
async function attachable(now: () => Record<string, unknown>, connected: (socket: WebSocket, query: URLSearchParams, n: number) => void): Promise<TestServer> {
  const server = await new TestServer((request, response) => {
    if (request.method === "POST") json(response, 201, { transport: "websocket", url: `/v1/attach/${sessionId}`, token: "ticket", expires_at: "" });
    else json(response, 200, now());
  }).start();
  const sockets = new WebSocketServer({ noServer: true });
  servers.push(sockets);
  let n = 0;
  server.server.on("upgrade", (request: IncomingMessage, socket: Duplex, head: Buffer) => {
    const url = new URL(request.url ?? "", "http://x");
    expect(url.searchParams.get("token")).toBe("ticket");
    expect(request.headers.authorization).toBeUndefined();
    sockets.handleUpgrade(request, socket, head, (ws) => connected(ws, url.searchParams, ++n));
  });
  return server;
}

function frame(which: number, offset: number, text: string): Buffer {
  const head = Buffer.alloc(9);
  head[0] = which;
  head.writeBigUInt64BE(BigInt(offset), 1);
  return Buffer.concat([head, Buffer.from(text)]);
}

const [, nodeWire] = wires[0] as (typeof wires)[number];

describe("output over a WebSocket", () => {
  test("both streams come until the program ends", async () => {
    await using server = await attachable(() => session(), (socket) => {
      socket.send(frame(1, 0, "out"));
      socket.send(frame(2, 0, "err"));
      socket.send(JSON.stringify({ type: "of-a-newer-server" }));
      socket.send(JSON.stringify({ type: "exit", session: { exit_code: 0, timed_out: false } }));
      socket.close(1000);
    });
    const s = await client(nodeWire(), server.base).session(sessionId);
    const got = await toArray(s);
    expect(got.map((o) => [o.stream, o.offset, Buffer.from(o.data).toString()])).toEqual([["stdout", 0, "out"], ["stderr", 0, "err"]]);
  });

  test("a lost connection goes on where it was, without a byte twice", async () => {
    await using server = await attachable(() => session(), (socket, query, n) => {
      if (n === 1) {
        socket.send(frame(1, 0, "one "), () => socket.terminate());
        return;
      }
      expect(query.get("stdout_offset")).toBe("4");
      socket.send(frame(1, 2, "e two")); // a server may send more than was asked for
      socket.send(JSON.stringify({ type: "exit", session: { exit_code: 0, timed_out: false } }));
    });
    const s = await client(nodeWire(), server.base).session(sessionId);
    expect((await toArray(s.output())).map((o) => Buffer.from(o.data).toString()).join("")).toBe("one two");
  });

  test.each([
    ["a gap", [frame(1, 5, "late")]],
    ["a truncation", [frame(1, 0, "ab"), JSON.stringify({ type: "truncated", stream: "stdout", from: 2, to: 9 })]],
  ])("output that is no longer kept is an error: %s", async (_, messages) => {
    await using server = await attachable(() => session(), (socket) => messages.forEach((m) => socket.send(m)));
    const s = await client(nodeWire(), server.base).session(sessionId);
    await expect(toArray(s.output())).rejects.toMatchObject({ code: "OUTPUT_LOST" });
  });

  test("connections that end without a byte are not tried for ever", async () => {
    await using server = await attachable(() => session(), (socket) => socket.close(1000));
    const s = await client(nodeWire(), server.base).session(sessionId);
    await expect(toArray(s.output())).rejects.toMatchObject({ code: "CONNECTION_FAILED" });
  });

  test("connections that are never made are no connections without a byte", async () => {
    let n = 0;
    await using server = await new TestServer((request, response) => {
      if (request.method === "POST") json(response, 201, { transport: "websocket", url: `/v1/attach/${sessionId}`, token: "ticket", expires_at: "" });
      else json(response, 200, session(n > 6 ? { state: "exited", exit_code: 0 } : {}));
    }).start();
    server.server.on("upgrade", (_request: IncomingMessage, socket: Duplex) => {
      n++;
      socket.destroy();
    });
    const s = await client(nodeWire(), server.base).session(sessionId);
    expect(await toArray(s.output())).toEqual([]);
    expect(n).toBe(7);
  });

  test("a program that has ended ends the output", async () => {
    await using server = await attachable(() => session({ state: "exited", exit_code: 0 }), (socket) => socket.close(1000));
    const s = await client(nodeWire(), server.base).session(sessionId);
    expect(await toArray(s.output())).toEqual([]);
  });

  test("a signal ends it, and leaving the loop closes the connection", async () => {
    let closed = 0;
    let arrived: () => void = () => undefined;
    const gone = new Promise<void>((resolve) => (arrived = resolve));
    await using server = await attachable(() => session(), (socket) => {
      socket.send(frame(1, 0, "x"));
      socket.on("close", () => (++closed === 2 ? arrived() : undefined));
    });
    const s = await client(nodeWire(), server.base).session(sessionId);
    for await (const { data } of s) {
      expect(data).toHaveLength(1);
      break;
    }
    const why = new Error("enough");
    const controller = new AbortController();
    const reading = (async () => {
      for await (const _ of s.output({ signal: controller.signal })) controller.abort(why);
    })();
    await expect(reading).rejects.toBe(why);
    await gone;
  });

  test("an attachment carries input, sizes and signals", async () => {
    const got: string[] = [];
    await using server = await attachable(() => session(), (socket) => {
      socket.on("message", (data, binary) => {
        got.push(`${binary ? "input" : "message"} ${(data as Buffer).toString()}`);
        if (got.length === 4) socket.send(JSON.stringify({ type: "error", problem: { code: "STATE_CONFLICT", message: "no terminal" } }));
        if (got.length === 4) socket.send(JSON.stringify({ type: "exit", session: { exit_code: 7, timed_out: false } }));
      });
    });
    const attachment = await (await client(nodeWire(), server.base).session(sessionId)).attach();
    await attachment.write("hé");
    await attachment.resize(100, 40);
    await attachment.signal("SIGINT");
    await attachment.closeStdin();
    const events = await toArray(attachment);
    expect(events).toMatchObject([{ type: "error", error: { code: "STATE_CONFLICT" } }, { type: "exit", session: { exit_code: 7 } }]);
    expect(got).toEqual(["input hé", 'message {"type":"resize","cols":100,"rows":40}', 'message {"type":"signal","signal":"SIGINT"}', 'message {"type":"close_stdin"}']);
  });

  test.each(["", "\x03\0\0\0\0\0\0\0\0x", "\x01short"])("a message that is no output is an error: %j", async (bad) => {
    await using server = await attachable(() => session(), (socket) => socket.send(Buffer.from(bad, "latin1")));
    const attachment = await (await client(nodeWire(), server.base).session(sessionId)).attach();
    await expect(toArray(attachment)).rejects.toMatchObject({ code: "INCOMPLETE" });
  });

  test.each(["https://elsewhere.example/x", "//elsewhere.example/x"])("a token is not taken to %s", async (url) => {
    await using server = await new TestServer((request, response) => {
      json(response, 200, request.method === "POST" ? { transport: "websocket", url, token: "ticket", expires_at: "" } : session());
    }).start();
    const s = await client(nodeWire(), server.base).session(sessionId);
    await expect(s.attach()).rejects.toMatchObject({ code: "UNSUPPORTED" });
  });
});

describe.each(wires)("output over HTTP with %s", (_, wire) => {
  test("goes on where it was after a lost connection", async () => {
    await using server = await new TestServer((request, response) => {
      const url = new URL(request.url ?? "", "http://x");
      if (!url.pathname.endsWith("/output")) {
        json(response, 200, session({ state: url.searchParams.get("wait") ? "running" : offset >= 8 ? "exited" : "running", exit_code: 0, stdout_bytes: 8 }));
        return;
      }
      const at = Number(url.searchParams.get("offset"));
      response.writeHead(200, { "coppice-offset": String(at), trailer: "Coppice-Eof" });
      offset = at + 4;
      if (at === 0) {
        response.write("one ", () => setTimeout(() => response.destroy(), 50));
        return;
      }
      response.write("two\n");
      response.addTrailers({ "Coppice-Eof": "true" });
      response.end();
    }).start();
    let offset = 0;
    const s = await client(wire(), server.base).session(sessionId);
    expect((await toBytes(s.stdout())).toString()).toBe("one two\n");
  });

  test("says when bytes are no longer kept", async () => {
    await using server = await new TestServer((request, response) => {
      if (!request.url?.includes("/output")) json(response, 200, session());
      else response.writeHead(200, { "coppice-offset": "10" }).end("x");
    }).start();
    const s = await client(wire(), server.base).session(sessionId);
    await expect(toBytes(s.stderr({ offset: 4 }))).rejects.toMatchObject({ code: "OUTPUT_LOST" });
  });
});

describe.each(wires)("files over %s", (_, wire) => {
  test("streams and blobs are sent", async () => {
    await using server = await new TestServer((_request, response) => json(response, 200, { id: workspaceId })).start();
    server.server.on("checkContinue", (request, response) => {
      response.writeContinue();
      server.server.emit("request", request, response);
    });
    const ws = await workspaceOf(wire(), server);
    const big = randomBytes(3 << 20).toString("latin1");
    for (const data of ["text", new Blob(["blob"]), stream("a ", "stream"), stream(big), new Uint8Array([65]), new Blob(["web"]).stream()]) await ws.files.write("/f", data);
    expect(server.requests.slice(-6).map((r) => r.body.length)).toEqual([4, 4, 8, big.length, 1, 3]);
    expect(server.requests.at(-1)?.headers["content-type"]).toBe("application/octet-stream");
  });

  test("a long upload in many pieces leaves no listeners behind", async () => {
    const warnings: string[] = [];
    const warned = (warning: Error): void => void warnings.push(warning.name);
    process.on("warning", warned);
    await using server = await new TestServer((_request, response) => json(response, 200, { id: workspaceId })).start();
    const ws = await workspaceOf(wire(), server);
    await ws.files.write("/f", stream(...Array.from({ length: 64 }, () => new Uint8Array(128 << 10))));
    expect(server.requests.at(-1)?.body).toHaveLength(8 << 20);
    process.off("warning", warned);
    expect(warnings).toEqual([]);
  });

  test("a refused upload is an error, and never repeated", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.method === "GET") json(response, 200, { id: workspaceId });
      else refuse(response, 413, "BODY_TOO_LARGE");
    }).start();
    server.server.on("checkContinue", (request, response) => {
      server.requests.push({ method: request.method ?? "", url: request.url ?? "", headers: request.headers, body: "" });
      refuse(response, 413, "BODY_TOO_LARGE"); // without reading anything
    });
    const ws = await workspaceOf(wire(), server);
    await expect(ws.files.write("/f", stream("x".repeat(100_000)))).rejects.toMatchObject({ code: "BODY_TOO_LARGE" });
    expect(server.requests.filter((r) => r.method === "PUT")).toHaveLength(1);
  });

  test("a longer file than the limit is an error", async () => {
    await using server = await new TestServer((request, response) => {
      if (request.url?.includes("/files")) response.end("x".repeat(1000));
      else json(response, 200, { id: workspaceId });
    }).start();
    const ws = await workspaceOf(wire(), server);
    await expect(ws.files.read("/f", { limit: 999 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
    expect(await ws.files.read("/f", { limit: 1000 })).toHaveLength(1000);
  });
});

test("a failure of the guest in the middle of a tree is an error", async () => {
  await using server = await new TestServer((request, response) => {
    if (!request.url?.includes("/files")) {
      json(response, 200, { id: workspaceId });
      return;
    }
    response.writeHead(200, { trailer: "Coppice-Status" });
    response.write(new Uint8Array(1024));
    response.addTrailers({ "Coppice-Status": "permission denied" });
    response.end();
  }).start();
  const ws = await workspaceOf(nodeWire(), server);
  await expect(toBytes(ws.files.downloadTar("/d"))).rejects.toMatchObject({ code: "INCOMPLETE" });
});

describe.each(wires)("events over %s", (_, wire) => {
  test("are read across connections, each once", async () => {
    await using server = await new TestServer((request, response) => {
      const after = request.headers["last-event-id"];
      if (after !== "7") response.writeHead(200, { "content-type": "text/event-stream" });
      if (after === undefined) response.end('id: 4\n\n: comment\n\nid: 5\nevent: x\ndata: {"id":"5"}\n\nid: 6\ndata: {"id":');
      else if (after === "5") response.end('id: 7\ndata: {"id":\ndata: "7"}\n\n');
      else refuse(response, 410, "EVENTS_EXPIRED");
    }).start();
    const got: string[] = [];
    let ready = 0;
    const reading = (async () => {
      for await (const event of client(wire(), server.base).events({ onReady: () => ready++, types: ["workspace"] })) got.push(event.id);
    })();
    await expect(reading).rejects.toMatchObject({ code: "EVENTS_EXPIRED" });
    expect(got).toEqual(["5", "7"]);
    expect(ready).toBe(1);
  });
});

test("events that never come are not asked for without end", async () => {
  let tries = 0;
  const context = { transport: { stream: () => (tries++, Promise.reject(new CoppiceError("CONNECTION_FAILED", "away"))) } } as unknown as Context;
  await expect(toArray(events(context, { past: true }))).rejects.toMatchObject({ code: "CONNECTION_FAILED" });
  expect(tries).toBe(1);
  vi.useFakeTimers();
  try {
    const reading = expect(toArray(events(context, {}))).rejects.toMatchObject({ code: "CONNECTION_FAILED" });
    await vi.advanceTimersByTimeAsync(3_600_000);
    await reading;
  } finally {
    vi.useRealTimers();
  }
  expect(tries).toBe(601);
});

/** silent opens a WebSocket whose other side does, or does not, answer pings; then keepAlive watches it. */
async function silent(answers: boolean, sent: number): Promise<{ dead: Promise<void>; pinged: () => number; socket: WebSocket }> {
  let pings = 0;
  const server = new WebSocketServer({ port: 0, host: "127.0.0.1", autoPong: answers });
  servers.push(server);
  server.on("connection", (other) => other.on("ping", () => pings++));
  await new Promise((resolve) => server.once("listening", resolve));
  const socket = new WebSocket(`ws://127.0.0.1:${(server.address() as { port: number }).port}`);
  await new Promise((resolve) => socket.once("open", resolve));
  const dead = new Promise<void>((resolve) => keepAlive(socket, () => sent, resolve, answers ? 3000 : 20));
  return { dead, pinged: () => pings, socket };
}

test("a WebSocket without an answer to pings is dead", async () => {
  const { dead, socket } = await silent(false, 0);
  await dead;
  socket.terminate();
});

test.each([["that answers pings", true, 0], ["that has not read our messages", false, 3]])("a WebSocket %s is alive", async (_, answers, sent) => {
  const { dead, pinged, socket } = await silent(answers, sent);
  let over = false;
  void dead.then(() => (over = true));
  await vi.waitFor(() => expect(pinged()).toBeGreaterThan(1), { timeout: 60_000 });
  expect(over).toBe(false);
  socket.terminate();
});

test.each([
  ["whole", '{"seq":1}\n{"se', 'q":2}\n', undefined],
  ["cut short", '{"seq":1}\n', '{"seq":2}', "INCOMPLETE"],
  ["without JSON", "x\n", "", "INCOMPLETE"],
  ["too long", "x".repeat(2 << 20), "", "LIMIT_EXCEEDED"],
])("events of a watch: %s", async (_, one, two, code) => {
  await using server = await new TestServer((request, response) => {
    if (!request.url?.includes("/watches")) json(response, 200, { id: workspaceId });
    else response.write(one, () => response.end(two));
  }).start();
  const reading = toArray((await workspaceOf(nodeWire(), server)).watches.events("watch_1", { after: 0, follow: true }));
  if (code) await expect(reading).rejects.toMatchObject({ code });
  else expect((await reading).map((e) => e.seq)).toEqual([1, 2]);
  expect(server.requests.at(-1)?.url).toBe(`/v1/workspaces/${workspaceId}/watches/watch_1/events?after=0&follow=true`);
});

test("an event that is too long is an error", async () => {
  await expect(toArray(blocks(stream(`data: ${"x".repeat(2 << 20)}`), () => undefined))).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  const many = Array.from({ length: 40 }, () => `data: ${"x".repeat(64 << 10)}\n`);
  await expect(toArray(blocks(stream(...many), () => undefined))).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
});

test("an export is compared with the hash at its end, in chunks of any size", async () => {
  const content = randomBytes(1000);
  const whole = Buffer.concat([content, createHash("sha256").update(content).digest()]);
  for (const size of [1, 31, 32, 33, 500, 2000]) {
    const parts: Uint8Array[] = [];
    for (let at = 0; at < whole.length; at += size) parts.push(whole.subarray(at, at + size));
    expect((await toBytes(checked(stream(...parts)))).equals(whole)).toBe(true);
    parts.pop();
    await expect(toBytes(checked(stream(...parts)))).rejects.toMatchObject({ code: "INCOMPLETE" });
  }
  await expect(toBytes(checked(stream()))).rejects.toMatchObject({ code: "INCOMPLETE" });
});

test("messages wait for their reader, up to a bound", async () => {
  const queue = new MessageQueue(10);
  expect([queue.push("12345678"), queue.push("123"), queue.push("12")]).toEqual([true, false, true]);
  queue.fail(new Error("first"));
  queue.fail(new Error("second"));
  const reading = queue.read(() => undefined);
  expect((await reading.next()).value).toBe("12345678");
  expect((await reading.next()).value).toBe("12");
  await expect(reading.next()).rejects.toThrow("first");
});

test("a result has bytes and text", () => {
  const all = new Uint8Array(70_000).map((_, i) => i);
  const data = { exit_code: 3, timed_out: false, stdout: toBase64(all), stderr: "", encoding: "base64", session: { command: ["false"] } } as unknown as models.ExecResult;
  const result = new RunResult(data);
  expect(Buffer.from(result.stdoutBytes).equals(Buffer.from(all))).toBe(true);
  expect(() => result.check()).toThrow(/false ended with status 3/);
});

async function workspaceOf(wire: ReturnType<typeof nodeWire>, server: TestServer): Promise<Awaited<ReturnType<ReturnType<typeof client>["workspace"]>>> {
  return client(wire, server.base).workspace(workspaceId);
}
