import type { Operations } from "./gen/routes.js";
import { type Call, type CallOptions, type Query, Transport } from "./transport.js";
import type { Source } from "./wire.js";

/** Bounds on what a workspace can write to this machine. */
export interface CopyLimits {
  /** Bytes of file content; default 10 GiB. */
  maxBytes?: number;
  /** Files, directories and links; default 1,000,000. */
  maxEntries?: number;
}

export interface Copied {
  /** Bytes of file content. */
  bytes: number;
  /** Links that lead outside, hard links to missing files, devices and pipes: they were left out. */
  leftOut: number;
}

/** Disk is what a runtime with a file system adds. */
export interface Disk {
  /** The bytes of a local directory as tar. */
  pack(local: string, signal?: AbortSignal): { body: AsyncIterable<Uint8Array>; sent: () => number };
  /** Unpacks a tar whose names begin with base below a local directory. */
  unpack(body: AsyncIterable<Uint8Array>, base: string, local: string, limits: CopyLimits): Promise<Copied>;
  /** Writes a local file. */
  save(body: AsyncIterable<Uint8Array>, local: string, mode: number, limits: CopyLimits): Promise<Copied>;
  /** Opens a local file. */
  load(local: string): Promise<{ body: Source; size: number; mode: string }>;
  /** What a local path is. */
  kind(local: string): Promise<"dir" | "file" | "none" | "other">;
}

/** Context is what the objects of the client share. */
export interface Context {
  transport: Transport;
  waitLimitMs: number;
  disk: Disk | undefined;
}

type Listing = { items: unknown[]; next_cursor?: string };
type ListName = { [Name in keyof Operations]: Operations[Name]["result"] extends Listing ? Name : never }[keyof Operations];
type Item<Name extends ListName> = Operations[Name]["result"] extends { items: (infer T)[] } ? T : never;

const pageSize = 500;

/** all yields every item of a list, page by page. */
export async function* all<Name extends ListName>(
  context: Context,
  name: Name,
  call: { path?: Operations[Name]["path"]; query?: Query } & CallOptions,
): AsyncGenerator<Item<Name>, void, void> {
  for (let cursor: string | undefined; ; ) {
    const query = { limit: pageSize, ...call.query, cursor } as Call<Name>["query"];
    const page = (await context.transport.call(name, { ...call, query } as Call<Name>)) as Listing;
    yield* page.items as Item<Name>[];
    if (!page.next_cursor) return;
    cursor = page.next_cursor;
  }
}

/** The parts of call options, without anything else that the object may have. */
export function only(options: CallOptions): CallOptions {
  return { signal: options.signal, idempotencyKey: options.idempotencyKey };
}
