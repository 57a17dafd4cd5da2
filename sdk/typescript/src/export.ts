import { sha256 } from "@noble/hashes/sha2.js";
import type { Context } from "./context.js";
import { CoppiceError } from "./errors.js";
import type { CheckpointID } from "./gen/models.js";
import type { CallOptions } from "./transport.js";

const hashSize = 32;

export interface ExportedFile {
  /** Bytes of the whole file; undefined if the server did not say. */
  size: number | undefined;
  /** The bytes. If the file is not complete, the loop ends with the error INCOMPLETE. */
  body: AsyncIterable<Uint8Array>;
  cancel: () => void;
}

/** exportCheckpoint streams a checkpoint as one file, and compares it with the hash at its end. */
export async function exportCheckpoint(context: Context, id: CheckpointID, options: CallOptions): Promise<ExportedFile> {
  const answer = await context.transport.stream("exportCheckpoint", { path: { checkpoint_id: id }, signal: options.signal });
  const length = answer.header("content-length");
  return { size: length === undefined ? undefined : Number(length), body: checked(answer.body), cancel: () => answer.cancel() };
}

/** checked passes bytes on, and throws unless the last 32 of them are the hash of the rest. */
export async function* checked(body: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array, void, void> {
  const sum = sha256.create();
  let tail: Uint8Array = new Uint8Array(0);
  for await (const chunk of body) {
    if (chunk.length >= hashSize) {
      sum.update(tail);
      sum.update(chunk.subarray(0, chunk.length - hashSize));
      tail = chunk.slice(chunk.length - hashSize);
    } else {
      const held = new Uint8Array(tail.length + chunk.length);
      held.set(tail);
      held.set(chunk, tail.length);
      const more = Math.max(held.length - hashSize, 0);
      sum.update(held.subarray(0, more));
      tail = held.slice(more);
    }
    yield chunk;
  }
  const want = sum.digest();
  if (tail.length !== hashSize || want.some((b, i) => b !== tail[i])) throw new CoppiceError("INCOMPLETE", "the exported file was changed or cut short on its way");
}
