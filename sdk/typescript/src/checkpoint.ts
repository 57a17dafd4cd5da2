import { all, type Context, only } from "./context.js";
import { CoppiceError, isCode } from "./errors.js";
import { exportCheckpoint, type ExportedFile } from "./export.js";
import type * as models from "./gen/models.js";
import { streamStep } from "./steps.js";
import type { CallOptions } from "./transport.js";
import { collect } from "./wire.js";
import { type Forks, forksOf, Workspace } from "./workspace.js";

/** How often annotate tries while others keep changing the checkpoint. */
const annotateAttempts = 100;
const pageSize = 500;
const maxFile = 256 << 20;

/** Checkpoint is an immutable node of the tree. */
export class Checkpoint {
  readonly #context: Context;
  #data: models.Checkpoint;

  constructor(context: Context, data: models.Checkpoint) {
    this.#context = context;
    this.#data = data;
  }

  get id(): models.CheckpointID {
    return this.#data.id;
  }

  get name(): string | undefined {
    return this.#data.name;
  }

  get state(): models.CheckpointState {
    return this.#data.state;
  }

  /** What the server said last. */
  get data(): models.Checkpoint {
    return this.#data;
  }

  async refresh(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.call("getCheckpoint", { path: this.#path(), signal: options.signal });
    return this;
  }

  /** fork starts workspaces from the checkpoint, all at once. It succeeds when at least one is ready; see `failures`. */
  async fork(request: number | models.ForkCheckpointRequest = {}, options: CallOptions = {}): Promise<Forks> {
    const body = typeof request === "number" ? { count: request } : request;
    return forksOf(this.#context, await this.#context.transport.start("forkCheckpoint", { path: this.#path(), body, ...only(options) }));
  }

  /** restore starts one workspace, which may have a name, from the checkpoint. */
  async restore(request: string | models.RestoreCheckpointRequest = {}, options: CallOptions = {}): Promise<Workspace> {
    const body = typeof request === "string" ? { workspace_name: request } : request;
    const result = await this.#context.transport.start("restoreCheckpoint", { path: this.#path(), body, ...only(options) });
    return new Workspace(this.#context, result.workspace);
  }

  /**
   * step tries several actions, each in a fork of its own, and returns when all have ended. An action that failed has a
   * `problem`, and does not end the others.
   */
  step(request: models.StepAction[] | models.StepRequest, options: CallOptions = {}): Promise<models.StepResult> {
    const body = Array.isArray(request) ? { actions: request } : request;
    return this.#context.transport.start("stepCheckpoint", { path: this.#path(), body, ...only(options) });
  }

  /**
   * streamStep does the same, and yields the results as they come: first an event with the id of the operation alone, then
   * one for each action when it ends. If the connection breaks, it asks again, and yields nothing twice. If the operation
   * failed, because it was canceled for example, it throws why. The step goes on if the signal or the caller ends the loop.
   */
  streamStep(request: models.StepAction[] | models.StepRequest, options: CallOptions = {}): AsyncGenerator<models.StepEvent, void, void> {
    const body = Array.isArray(request) ? { actions: request } : request;
    return streamStep(this.#context, this.id, body, options);
  }

  /** waitSealed waits until the checkpoint is in the store, or will never be: `state` says which. */
  async waitSealed(options: CallOptions = {}): Promise<this> {
    const deadline = Date.now() + this.#context.waitLimitMs;
    for (;;) {
      this.#data = await this.#context.transport.call("getCheckpoint", { path: this.#path(), query: { wait: "sealed" }, signal: options.signal });
      if (this.#data.state !== "captured" && this.#data.state !== "capturing") return this;
      options.signal?.throwIfAborted();
      if (Date.now() > deadline) throw new CoppiceError("WAIT_TIMEOUT", `checkpoint ${this.id} was not sealed in ${this.#context.waitLimitMs} ms`);
    }
  }

  /** patch changes name, labels, annotations or pin; with `version`, only if that is still the version. */
  async patch(request: models.PatchCheckpointRequest, options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.call("patchCheckpoint", { path: this.#path(), body: request, signal: options.signal });
    return this;
  }

  /**
   * annotate sets annotations by compare-and-set: change gets the present checkpoint and returns what to set; null
   * removes an annotation. If somebody else was faster, change is called again.
   */
  async annotate(change: models.Annotations | ((now: models.Checkpoint) => models.Annotations), options: CallOptions = {}): Promise<this> {
    if (typeof change !== "function") return this.patch({ annotations: change }, options);
    for (let attempt = 1; ; attempt++) {
      await this.refresh(options);
      try {
        return await this.patch({ version: this.#data.version, annotations: change(this.#data) }, options);
      } catch (error) {
        if (!isCode(error, "VERSION_CONFLICT") || attempt === annotateAttempts) throw error;
      }
    }
  }

  /** delete deletes the bytes; forks live on. With cascade, the descendants too: all of them or none. */
  async delete(options: { cascade?: boolean; dryRun?: boolean } & CallOptions = {}): Promise<models.PruneResult | undefined> {
    const query = { cascade: options.cascade || undefined, dry_run: options.dryRun || undefined };
    return this.#context.transport.start("deleteCheckpoint", { path: this.#path(), query, signal: options.signal });
  }

  /** prune deletes what a policy does not keep of the checkpoint and its descendants; with dry_run it only says what. */
  prune(request: models.PruneRequest, options: CallOptions = {}): Promise<models.PruneResult> {
    return this.#context.transport.start("pruneCheckpoints", { path: this.#path(), body: request, signal: options.signal });
  }

  retention(options: CallOptions = {}): Promise<models.Retention> {
    return this.#context.transport.call("getRetention", { path: this.#path(), signal: options.signal });
  }

  /** prepared says how many machines are prepared for forks of the checkpoint. */
  prepared(options: CallOptions = {}): Promise<models.Prepared> {
    return this.#context.transport.call("getPrepared", { path: this.#path(), signal: options.signal });
  }

  /** prepare asks for machines that are prepared for forks of the checkpoint. It replaces what was asked for before; a count of 0 ends it. */
  prepare(request: models.PrepareRequest, options: CallOptions = {}): Promise<models.Prepared> {
    return this.#context.transport.call("putPrepared", { path: this.#path(), body: request, signal: options.signal });
  }

  /** setRetention stores a policy, which the server applies about once a minute. */
  setRetention(policy: models.RetentionPolicy, options: CallOptions = {}): Promise<models.Retention> {
    return this.#context.transport.call("putRetention", { path: this.#path(), body: policy, signal: options.signal });
  }

  async deleteRetention(options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteRetention", { path: this.#path(), signal: options.signal });
  }

  /** usage is the usage of all descendants. */
  usage(options: CallOptions = {}): Promise<models.Usage> {
    return this.#context.transport.call("getCheckpointUsage", { path: this.#path(), signal: options.signal });
  }

  /** lineage yields the path from the checkpoint to its root. */
  lineage(options: CallOptions = {}): AsyncGenerator<models.Ancestor, void, void> {
    return all(this.#context, "getLineage", { path: this.#path(), ...options });
  }

  /** children yields the direct children, oldest first. */
  async *children(options: CallOptions = {}): AsyncGenerator<Checkpoint, void, void> {
    for await (const data of all(this.#context, "listChildren", { path: this.#path(), ...options })) yield new Checkpoint(this.#context, data);
  }

  /** tree yields the checkpoint and its descendants, breadth first. */
  tree(options: { depth?: number } & CallOptions = {}): AsyncGenerator<models.TreeNode, void, void> {
    return all(this.#context, "getTree", { path: this.#path(), query: { depth: options.depth }, signal: options.signal });
  }

  /** diff yields the pages of the differences to another checkpoint of the tree. The first has processes and memory. */
  async *diff(to: Checkpoint | models.CheckpointID, options: CallOptions = {}): AsyncGenerator<models.CheckpointDiff, void, void> {
    const other = typeof to === "string" ? to : to.id;
    for (let cursor: string | undefined; ; ) {
      const query = { to: other, limit: pageSize, cursor };
      const page = await this.#context.transport.call("diffCheckpoints", { path: this.#path(), query, patient: true, signal: options.signal });
      yield page;
      if (!page.next_cursor) return;
      cursor = page.next_cursor;
    }
  }

  /** effects yields what may have been changed outside on the path from the root, in the order of time. */
  effects(options: CallOptions = {}): AsyncGenerator<models.Effect, void, void> {
    return all(this.#context, "listEffects", { path: this.#path(), ...options });
  }

  /** readFile returns a file as it was when the machine was captured, at most 256 MiB of it. No machine runs for it. */
  async readFile(path: string, options: CallOptions = {}): Promise<Uint8Array> {
    const answer = await this.#context.transport.stream("getCheckpointFile", { path: this.#path(), query: { path }, signal: options.signal });
    return collect(answer.body, maxFile, path);
  }

  /**
   * export streams the checkpoint as one file; Coppice.import reads it. Where there is a store, the checkpoint must be
   * sealed: see waitSealed. Without a store, its host packs the file first.
   */
  export(options: CallOptions = {}): Promise<ExportedFile> {
    return exportCheckpoint(this.#context, this.id, options);
  }

  #path(): { checkpoint_id: string } {
    return { checkpoint_id: this.id };
  }
}
