import { Administration } from "./administration.js";
import { Checkpoint } from "./checkpoint.js";
import { all, type Context, type Disk, only } from "./context.js";
import { CoppiceError } from "./errors.js";
import { type EventFilter, events } from "./events.js";
import type * as models from "./gen/models.js";
import { Session } from "./session.js";
import { type CallOptions, Transport } from "./transport.js";
import { bytes, collect, type Source, type Wire } from "./wire.js";
import { Workspace } from "./workspace.js";

export interface ClientOptions {
  /** The address of the server: http://host:port or https://host:port; in Node.js also unix:///path. In a browser it may be a path of the page's own server. */
  server?: string;
  /** The API key. */
  token?: string;
  /** For how long a call waits for its operation, in milliseconds; default one hour. Then it fails with WAIT_TIMEOUT, and the operation goes on. */
  waitLimitMs?: number;
  /** Another implementation of fetch, instead of the client's own transport. */
  fetch?: typeof fetch;
}

export interface WorkspaceFilter extends CallOptions {
  name?: string;
  /** At least four characters. */
  idSuffix?: string;
  /** "key=value" or "key"; all must match. */
  labels?: string[];
  /** Default: all but terminated. */
  states?: models.WorkspaceState[];
  /** Only those whose head it is. */
  checkpoint?: models.CheckpointID;
  /** Only those that were forked from it. */
  parentCheckpoint?: models.CheckpointID;
}

export interface CheckpointFilter extends CallOptions {
  name?: string;
  idSuffix?: string;
  labels?: string[];
  /** Default: captured and sealed. */
  states?: models.CheckpointState[];
  kind?: models.CheckpointKind;
  /** Only those that were taken of it. */
  workspace?: models.WorkspaceID;
  /** Only its direct children. */
  parent?: models.CheckpointID;
}

export interface OperationFilter extends CallOptions {
  states?: models.OperationState[];
  kinds?: models.OperationKind[];
  workspace?: models.WorkspaceID;
  checkpoint?: models.CheckpointID;
  /** The key of the request that began the operation. The server keeps keys for 24 hours. */
  idempotencyKey?: string;
}

const hour = 3_600_000;
const maxDocument = 16 << 20;

/** Coppice is the client of one server. Make it with connect. */
export class Coppice {
  readonly #context: Context;
  /** Projects, keys, the audit log, runners, images and the store. */
  readonly admin: Administration;

  /** Callers use connect. */
  constructor(wire: Wire, options: { base: string; token?: string | undefined; userAgent?: string; waitLimitMs?: number | undefined; disk?: Disk }) {
    const waitLimitMs = options.waitLimitMs ?? hour;
    const transport = new Transport(wire, { base: options.base, token: options.token, userAgent: options.userAgent, waitLimitMs });
    this.#context = { transport, waitLimitMs, disk: options.disk };
    this.admin = new Administration(this.#context);
  }

  /** create makes a workspace from an image and returns it ready. */
  async create(image: string | models.CreateWorkspaceRequest = {}, request: Omit<models.CreateWorkspaceRequest, "image"> & CallOptions = {}): Promise<Workspace> {
    const { signal, idempotencyKey, ...rest } = request;
    const body = typeof image === "string" ? { ...rest, image } : { ...image, ...rest };
    return new Workspace(this.#context, await this.#context.transport.start("createWorkspace", { body, signal, idempotencyKey }));
  }

  /** workspace returns a workspace by its id or its name. */
  async workspace(idOrName: string, options: CallOptions = {}): Promise<Workspace> {
    if (idOrName.startsWith("ws_")) {
      return new Workspace(this.#context, await this.#context.transport.call("getWorkspace", { path: { workspace_id: idOrName }, signal: options.signal }));
    }
    for await (const found of this.workspaces({ name: idOrName, signal: options.signal })) return found;
    throw new CoppiceError("WORKSPACE_NOT_FOUND", `there is no workspace named ${JSON.stringify(idOrName)}`);
  }

  /** workspaces yields the workspaces that match, newest first. */
  async *workspaces(filter: WorkspaceFilter = {}): AsyncGenerator<Workspace, void, void> {
    const query = {
      name: filter.name,
      id_suffix: filter.idSuffix,
      label: filter.labels,
      state: filter.states,
      checkpoint_id: filter.checkpoint,
      parent_checkpoint_id: filter.parentCheckpoint,
    };
    for await (const data of all(this.#context, "listWorkspaces", { query, signal: filter.signal })) yield new Workspace(this.#context, data);
  }

  /** checkpoint returns a checkpoint by its id or its name. */
  async checkpoint(idOrName: string, options: CallOptions = {}): Promise<Checkpoint> {
    if (idOrName.startsWith("ckpt_")) {
      return new Checkpoint(this.#context, await this.#context.transport.call("getCheckpoint", { path: { checkpoint_id: idOrName }, signal: options.signal }));
    }
    for await (const found of this.checkpoints({ name: idOrName, signal: options.signal })) return found;
    throw new CoppiceError("CHECKPOINT_NOT_FOUND", `there is no checkpoint named ${JSON.stringify(idOrName)}`);
  }

  /** checkpoints yields the checkpoints that match, newest first. */
  async *checkpoints(filter: CheckpointFilter = {}): AsyncGenerator<Checkpoint, void, void> {
    const query = {
      name: filter.name,
      id_suffix: filter.idSuffix,
      label: filter.labels,
      state: filter.states,
      kind: filter.kind,
      workspace_id: filter.workspace,
      parent_id: filter.parent,
    };
    for await (const data of all(this.#context, "listCheckpoints", { query, signal: filter.signal })) yield new Checkpoint(this.#context, data);
  }

  /**
   * import makes a checkpoint from a file of Checkpoint.export, of this or another installation. A stream is read once,
   * so the client does not repeat the call; with an idempotency key the caller may.
   */
  async import(file: Source, options: { name?: string } & CallOptions = {}): Promise<Checkpoint> {
    const call = { query: { name: options.name }, raw: bytes(file), ...only(options) };
    return new Checkpoint(this.#context, await this.#context.transport.call("importCheckpoint", call));
  }

  /** session returns a session by its id. */
  async session(id: models.SessionID, options: CallOptions = {}): Promise<Session> {
    return new Session(this.#context, await this.#context.transport.call("getSession", { path: { session_id: id }, signal: options.signal }));
  }

  /** operation returns an operation as it is now. */
  operation(id: models.OperationID, options: CallOptions = {}): Promise<models.Operation> {
    return this.#context.transport.call("getOperation", { path: { operation_id: id }, signal: options.signal });
  }

  /** operations yields the operations of the project, newest first. */
  operations(filter: OperationFilter = {}): AsyncGenerator<models.Operation, void, void> {
    const query = { state: filter.states, kind: filter.kinds, workspace_id: filter.workspace, checkpoint_id: filter.checkpoint, idempotency_key: filter.idempotencyKey };
    return all(this.#context, "listOperations", { query, signal: filter.signal });
  }

  /** cancelOperation stops an operation that makes workspaces, and waits for its end: it may still have succeeded. */
  async cancelOperation(id: models.OperationID, options: CallOptions = {}): Promise<models.Operation> {
    const { transport } = this.#context;
    const call = { path: { operation_id: id }, query: { wait: 60 }, signal: options.signal };
    let operation = await transport.call("cancelOperation", call);
    while (operation.state !== "succeeded" && operation.state !== "failed") operation = await transport.call("getOperation", call);
    return operation;
  }

  /** waitOperation waits for the end of an operation, and throws if it failed. */
  async waitOperation(id: models.OperationID, options: { waitLimitMs?: number } & CallOptions = {}): Promise<models.Operation> {
    return this.#context.transport.waitOperation(await this.operation(id, options), options);
  }

  /** events yields the events of the project, each once and in order, until the signal ends it. */
  events(filter: EventFilter = {}): AsyncGenerator<models.Event, void, void> {
    return events(this.#context, filter);
  }

  /** self returns the key that the client uses. */
  self(options: CallOptions = {}): Promise<models.APIKey> {
    return this.#context.transport.call("getSelf", options);
  }

  /**
   * buildImage builds an image of the project, and returns it when it is built: create makes workspaces from it by its
   * name. Instructions that were carried out before, with the same files, are not carried out again.
   */
  async buildImage(request: models.BuildImageRequest & CallOptions): Promise<models.BuiltImage> {
    const { signal, idempotencyKey, ...body } = request;
    return (await this.#context.transport.start("buildImage", { body, signal, idempotencyKey })).image;
  }

  /** startBuild begins to build an image. operationLog has what it says, and waitOperation waits for its end. */
  async startBuild(request: models.BuildImageRequest & CallOptions): Promise<models.Operation> {
    const { signal, idempotencyKey, ...body } = request;
    const call = { query: { wait: 0 }, body, signal, idempotencyKey };
    // Its type is that of a build that has ended; one that goes on has an operation instead.
    const begun: models.BuildResult | models.Operation = await this.#context.transport.call("buildImage", call);
    return "operation_id" in begun ? this.operation(begun.operation_id, { signal }) : begun;
  }

  /** operationLog returns a part of the log of a build, of at most about 256 KiB. If it is empty, there is no more yet. */
  async operationLog(id: models.OperationID, options: { offset?: number } & CallOptions = {}): Promise<Uint8Array> {
    const call = { path: { operation_id: id }, query: { offset: options.offset ?? 0 }, signal: options.signal };
    const answer = await this.#context.transport.stream("getOperationLog", call);
    return collect(answer.body, maxDocument, "the log");
  }

  /** builtImages returns the images that the project has built, by name. */
  async builtImages(options: CallOptions = {}): Promise<models.BuiltImage[]> {
    const page = await this.#context.transport.call("listImages", { query: { limit: 1 }, signal: options.signal });
    return page.built ?? [];
  }

  /** builtImage returns an image that the project has built. */
  builtImage(name: string, options: CallOptions = {}): Promise<models.BuiltImage> {
    return this.#context.transport.call("getImage", { path: { image_name: name }, signal: options.signal });
  }

  /** deleteImage removes the name of an image that the project has built. Its checkpoint stays, and can be deleted then. */
  async deleteImage(name: string, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteImage", { path: { image_name: name }, signal: options.signal });
  }

  /**
   * putUpload sends a tar, plain or with gzip, for builds, in the place of an earlier upload with the id. It is kept for
   * a day. writeTar makes a tar of entries.
   */
  putUpload(id: string, tar: Source, options: CallOptions = {}): Promise<models.Upload> {
    const headers = { "content-type": "application/x-tar" };
    return this.#context.transport.call("putUpload", { path: { upload_id: id }, raw: bytes(tar), headers, signal: options.signal });
  }

  /** upload returns what is known of an upload. */
  upload(id: string, options: CallOptions = {}): Promise<models.Upload> {
    return this.#context.transport.call("getUpload", { path: { upload_id: id }, signal: options.signal });
  }

  /** deleteUpload removes an upload. */
  async deleteUpload(id: string, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteUpload", { path: { upload_id: id }, signal: options.signal });
  }

  /** images yields the images that runners have; builtImages has those of the project. */
  images(options: CallOptions = {}): AsyncGenerator<models.Image, void, void> {
    return all(this.#context, "listImages", options);
  }

  /** ready asks once whether the server can accept work. */
  ready(options: CallOptions = {}): Promise<models.Health> {
    return this.#context.transport.call("getReadiness", { once: true, ...options });
  }

  /** health asks once whether the server runs. */
  health(options: CallOptions = {}): Promise<models.Health> {
    return this.#context.transport.call("getHealth", { once: true, ...options });
  }

  /** specification returns the server's OpenAPI document, in YAML. */
  async specification(options: CallOptions = {}): Promise<string> {
    const answer = await this.#context.transport.stream("getSpecification", options);
    return new TextDecoder().decode(await collect(answer.body, maxDocument, "the specification"));
  }

  /** authority returns the certificate that verifies attestations. Get it once, over a channel that you trust. */
  authority(options: CallOptions = {}): Promise<models.Authority> {
    return this.#context.transport.call("getAuthority", options);
  }

  /** close closes idle connections. */
  close(): void {
    this.#context.transport.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

/** webBase checks an address of the scheme http or https, and returns it without a slash at its end. */
export function webBase(server: string, relativeTo?: string): string {
  let url: URL;
  try {
    url = new URL(server, relativeTo);
  } catch {
    throw new CoppiceError("INVALID_FIELD", "the server's address is not a URL"); // it may contain a password
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") throw new CoppiceError("INVALID_FIELD", `the server's address has the scheme ${url.protocol} instead of http: or https:`);
  if (url.username || url.password) throw new CoppiceError("INVALID_FIELD", "the server's address has a user or a password in it: pass the key as token");
  return url.origin + url.pathname.replace(/\/+$/, "");
}
