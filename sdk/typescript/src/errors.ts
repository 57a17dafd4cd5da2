import { hints, type ErrorCode } from "./gen/codes.js";
import type { Failure, FieldProblem, Problem } from "./gen/models.js";

export type { ErrorCode };

/** Codes of failures that the client itself finds. */
export type ClientCode = "CONNECTION_FAILED" | "WAIT_TIMEOUT" | "LIMIT_EXCEEDED" | "OUTPUT_LOST" | "INCOMPLETE" | "NOT_HERE" | "COMMAND_FAILED";

const clientHints: Record<ClientCode, string> = {
  CONNECTION_FAILED: "Check the address, and that the server runs.",
  WAIT_TIMEOUT: "The operation goes on: wait for it again by its id, or raise waitLimitMs.",
  LIMIT_EXCEEDED: "Raise the limit, or ask for less.",
  OUTPUT_LOST: "Read faster, or let the program write to a file. A session keeps the last MiB of each stream.",
  INCOMPLETE: "Repeat the call.",
  NOT_HERE: "Use a runtime that has it, such as Node.js.",
  COMMAND_FAILED: "Look at the result's stdout and stderr.",
};

/** Code names a kind of error. A newer server may have codes that this version does not know. */
export type Code = ErrorCode | ClientCode | (string & {});

export interface ErrorDetails {
  status?: number;
  requestId?: string;
  operationId?: string;
  fields?: FieldProblem[];
  currentVersion?: number;
  retryAfter?: number;
  recoverFrom?: string;
  cause?: unknown;
}

/**
 * CoppiceError is a refusal of the server, the failure of an operation, or a failure that the client found. Programs
 * branch on `code`, which is stable, and never on the text.
 */
export class CoppiceError extends Error {
  override readonly name = "CoppiceError";
  readonly code: Code;
  /** What happened, to which object. */
  readonly detail: string;
  /** What to do next; empty if that is not known. */
  readonly hint: string;
  /** The HTTP status; 0 if no answer of the server was the reason. */
  readonly status: number;
  /** The server's log has the cause under this id. */
  readonly requestId: string | undefined;
  readonly operationId: string | undefined;
  readonly fields: FieldProblem[];
  /** With the code VERSION_CONFLICT. */
  readonly currentVersion: number | undefined;
  /** After how many seconds the server wants a repetition. */
  readonly retryAfter: number | undefined;
  /** For a lost workspace: the newest of its checkpoints that can still be restored. */
  readonly recoverFrom: string | undefined;

  constructor(code: Code, detail: string, more: ErrorDetails = {}) {
    super(detail ? `${detail} (${code})` : code, more.cause === undefined ? undefined : { cause: more.cause });
    this.code = code;
    this.detail = detail;
    this.hint = hintOf(code);
    this.status = more.status ?? 0;
    this.requestId = more.requestId;
    this.operationId = more.operationId;
    this.fields = more.fields ?? [];
    this.currentVersion = more.currentVersion;
    this.retryAfter = more.retryAfter;
    this.recoverFrom = more.recoverFrom;
  }
}

function hintOf(code: Code): string {
  const all: Record<string, string> = { ...hints, ...clientHints };
  return Object.hasOwn(all, code) ? (all[code] ?? "") : "";
}

/** isCode reports whether an error is a CoppiceError with one of the codes. */
export function isCode(error: unknown, ...codes: Code[]): error is CoppiceError {
  return error instanceof CoppiceError && codes.includes(error.code);
}

/** failure turns the reason of a failed object into an error. */
export function failure(f: Failure, operationId?: string): CoppiceError {
  return new CoppiceError(f.code, f.message, { operationId, recoverFrom: f.recover_from });
}

/** problem reads an answer of 400 or more. If it is not a problem document, it comes from a proxy. */
export function problem(what: string, status: number, requestId: string | undefined, body: string, retryAfter?: number): CoppiceError {
  let p: Partial<Problem> = {};
  try {
    const value: unknown = JSON.parse(body);
    if (typeof value === "object" && value !== null) p = value;
  } catch {
    // The status says enough.
  }
  if (typeof p.code !== "string" || p.code === "") return new CoppiceError(`HTTP_${status}`, `${what} answered with status ${status}`, { status, requestId, retryAfter });
  return new CoppiceError(p.code, String(p.detail ?? ""), {
    status,
    requestId: p.request_id || requestId,
    operationId: p.operation_id,
    fields: Array.isArray(p.fields) ? p.fields : [],
    currentVersion: p.current_version,
    retryAfter,
  });
}
