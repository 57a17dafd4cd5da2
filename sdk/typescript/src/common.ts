// What both entries have.
export { Attachment, type AttachEvent } from "./attach.js";
export { Administration, type AuditFilter } from "./administration.js";
export { Checkpoint } from "./checkpoint.js";
export { type CheckpointFilter, type ClientOptions, Coppice, type OperationFilter, type WorkspaceFilter } from "./client.js";
export type { Copied, CopyLimits } from "./context.js";
export { type ClientCode, type Code, CoppiceError, type ErrorCode, isCode } from "./errors.js";
export type { EventFilter } from "./events.js";
export type { ExportedFile } from "./export.js";
export { Files, type WriteOptions } from "./files.js";
export type * as models from "./gen/models.js";
export { type Exit, type Output, RunResult, Session, type Stream } from "./session.js";
export { type NewEntry, readTar, type TarEntry, type TarLimits, writeTar } from "./tar.js";
export type { CallOptions } from "./transport.js";
export { Watches } from "./watches.js";
export type { Source } from "./wire.js";
export { type Command, type ExecOptions, Forks, Grants, Ports, type RunOptions, Workspace } from "./workspace.js";
