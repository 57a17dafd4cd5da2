import * as http from "node:http";
import type { AddressInfo, Socket } from "node:net";
import { Coppice } from "../src/client.js";
import { FetchWire } from "../src/fetchwire.js";
import { NodeWire } from "../src/nodewire.js";
import type { Wire } from "../src/wire.js";

export type Handler = (request: http.IncomingMessage, response: http.ServerResponse, body: string) => void;

/** A server whose answers a test writes. */
export class TestServer {
  readonly server: http.Server;
  readonly requests: { method: string; url: string; headers: http.IncomingHttpHeaders; body: string }[] = [];
  readonly #sockets = new Set<Socket>();
  base = "";

  constructor(handler: Handler) {
    this.server = http.createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on("data", (chunk: Buffer) => chunks.push(chunk));
      request.on("error", () => undefined);
      request.on("end", () => {
        const body = Buffer.concat(chunks).toString("utf8");
        this.requests.push({ method: request.method ?? "", url: request.url ?? "", headers: request.headers, body });
        handler(request, response, body);
      });
    });
    this.server.on("connection", (socket: Socket) => {
      this.#sockets.add(socket);
      socket.on("close", () => this.#sockets.delete(socket));
    });
  }

  async start(): Promise<this> {
    await new Promise<void>((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    this.base = `http://127.0.0.1:${(this.server.address() as AddressInfo).port}`;
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy(); // those of WebSockets, too
    await new Promise((resolve) => this.server.close(resolve));
  }
}

export function json(response: http.ServerResponse, status: number, value: unknown, headers: Record<string, string> = {}): void {
  response.writeHead(status, { "content-type": "application/json", ...headers });
  response.end(JSON.stringify(value));
}

export function refuse(response: http.ServerResponse, status: number, code: string, more: Record<string, unknown> = {}, headers: Record<string, string> = {}): void {
  json(response, status, { type: "about:blank", title: "", status, detail: "what happened", code, request_id: "req-1", ...more }, headers);
}

export const wires: [string, () => Wire][] = [
  ["node:http", () => new NodeWire()],
  ["fetch", () => new FetchWire()],
];

export function client(wire: Wire, base: string, waitLimitMs?: number): Coppice {
  return new Coppice(wire, { base, token: "secret", waitLimitMs });
}

export const workspaceId = "ws_00000000000000000000000000";
export const sessionId = "sess_00000000000000000000000000";

export function workspace(more: Record<string, unknown> = {}): Record<string, unknown> {
  return { id: workspaceId, name: "demo", state: "ready", epoch: 1, version: 1, labels: {}, ...more };
}

export function session(more: Record<string, unknown> = {}): Record<string, unknown> {
  return { id: sessionId, workspace_id: workspaceId, state: "running", exit_code: null, timed_out: false, stdout_bytes: 0, stderr_bytes: 0, command: ["x"], ...more };
}

export async function* stream(...chunks: (Uint8Array | string)[]): AsyncGenerator<Uint8Array, void, void> {
  for (const chunk of chunks) yield typeof chunk === "string" ? new TextEncoder().encode(chunk) : chunk;
}

export async function toBytes(body: AsyncIterable<Uint8Array>): Promise<Buffer> {
  const parts: Uint8Array[] = [];
  for await (const part of body) parts.push(part);
  return Buffer.concat(parts);
}

export async function toArray<T>(items: AsyncIterable<T>): Promise<T[]> {
  const out: T[] = [];
  for await (const item of items) out.push(item);
  return out;
}
