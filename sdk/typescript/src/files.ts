import type { Context, Copied, CopyLimits, Disk } from "./context.js";
import { CoppiceError, isCode } from "./errors.js";
import type { FileInfo, FileList, MadeDirectory, MakeDirectoryRequest, RenameFileRequest, SetFileAttributesRequest, WorkspaceID } from "./gen/models.js";
import type { CallOptions } from "./transport.js";
import { type NewEntry, readTar, type TarEntry, type TarLimits, writeTar } from "./tar.js";
import { bytes, collect, type Source, type WireAnswer } from "./wire.js";

export interface WriteOptions extends CallOptions {
  /** Octal permission bits, such as "0755". Default: those of the existing file, or 0644. */
  mode?: string;
  uid?: number;
  gid?: number;
  /** Make missing parent directories. */
  mkdirs?: boolean;
}

/** The most bytes that read returns unless the caller says otherwise. */
const defaultReadLimit = 64 << 20;

/** Files of a workspace. Paths are absolute paths of the guest. */
export class Files {
  readonly #context: Context;
  readonly #id: WorkspaceID;

  constructor(context: Context, id: WorkspaceID) {
    this.#context = context;
    this.#id = id;
  }

  /** read returns the bytes of a file, at most `limit` of them (64 MiB); a longer file is an error. */
  async read(path: string, options: { limit?: number } & CallOptions = {}): Promise<Uint8Array> {
    const answer = await this.#get(path, {}, options);
    return collect(answer.body, options.limit ?? defaultReadLimit, path);
  }

  /** readText is read for a file of UTF-8 text. */
  async readText(path: string, options: { limit?: number } & CallOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.read(path, options));
  }

  /** open streams a file of any size. Read the body to its end, leave its loop early, or call cancel. */
  async open(path: string, options: CallOptions = {}): Promise<{ info: FileInfo; body: AsyncIterable<Uint8Array>; cancel: () => void }> {
    const answer = await this.#get(path, {}, options);
    try {
      return { info: JSON.parse(answer.header("coppice-file") ?? "") as FileInfo, body: answer.body, cancel: () => answer.cancel() };
    } catch (cause) {
      answer.cancel();
      throw new CoppiceError("INCOMPLETE", `read ${path}: the server did not say what it is`, { cause });
    }
  }

  /** write replaces a file; readers see either the old file or the whole new one. */
  async write(path: string, data: Source, options: WriteOptions = {}): Promise<FileInfo> {
    const { mode, uid, gid, mkdirs, signal } = options;
    const query = { path, mode, uid, gid, mkdirs: mkdirs || undefined };
    return (await this.#context.transport.call("putFile", { path: this.#path(), query, raw: bytes(data), signal, once: true })) as FileInfo;
  }

  async stat(path: string, options: CallOptions = {}): Promise<FileInfo> {
    return (await this.#context.transport.call("getFile", { path: this.#path(), query: { path, stat: true }, signal: options.signal })) as FileInfo;
  }

  async exists(path: string, options: CallOptions = {}): Promise<boolean> {
    try {
      // HEAD: the answer has no body, and the path says which route it is.
      const answer = await this.#context.transport.stream("statFile", { path: this.#path(), query: { path }, signal: options.signal });
      answer.cancel();
      return true;
    } catch (error) {
      if (isCode(error, "FILE_NOT_FOUND")) return false;
      if (!isCode(error, "HTTP_404")) throw error;
    }
    // A problem without its body: is it the file that is missing, or the workspace?
    await this.#context.transport.call("getWorkspace", { path: this.#path(), signal: options.signal });
    return false;
  }

  /** list lists a directory; `truncated` says that it has more than 10,000 entries. */
  async list(path: string, options: CallOptions = {}): Promise<FileList> {
    return (await this.#context.transport.call("getFile", { path: this.#path(), query: { path, list: true }, signal: options.signal })) as FileList;
  }

  async remove(path: string, options: { recursive?: boolean } & CallOptions = {}): Promise<void> {
    const query = { path, recursive: options.recursive || undefined };
    await this.#context.transport.call("deleteFile", { path: this.#path(), query, patient: true, signal: options.signal });
  }

  /** mkdir makes a directory; with `parents` it is no error if it exists. */
  mkdir(path: string, request: Omit<MakeDirectoryRequest, "path"> & CallOptions = {}): Promise<MadeDirectory> {
    const { signal, idempotencyKey: _, ...rest } = request;
    return this.#context.transport.call("makeDirectory", { path: this.#path(), body: { ...rest, path }, signal });
  }

  /** rename moves a file or directory. */
  rename(from: string, to: string, request: Omit<RenameFileRequest, "from" | "to"> & CallOptions = {}): Promise<FileInfo> {
    const { signal, idempotencyKey: _, ...rest } = request;
    return this.#context.transport.call("renameFile", { path: this.#path(), body: { ...rest, from, to }, signal });
  }

  /** setAttributes sets and removes extended attributes of a file or directory. */
  setAttributes(path: string, request: Omit<SetFileAttributesRequest, "path">, options: CallOptions = {}): Promise<FileInfo> {
    return this.#context.transport.call("setFileAttributes", { path: this.#path(), body: { ...request, path }, signal: options.signal });
  }

  /** downloadTar streams a file or tree as a tar whose names begin with the last element of the path. */
  async *downloadTar(path: string, options: CallOptions = {}): AsyncGenerator<Uint8Array, void, void> {
    const answer = await this.#get(path, { tar: true }, options);
    yield* answer.body;
    const status = answer.trailer("coppice-status");
    if (status !== undefined && status !== "ok") throw new CoppiceError("INCOMPLETE", `read ${path}: ${status}`);
  }

  /** uploadTar unpacks a tar below a directory. */
  async uploadTar(dir: string, tar: Source, options: CallOptions = {}): Promise<FileInfo> {
    const headers = { "content-type": "application/x-tar" };
    const call = { path: this.#path(), query: { path: dir, untar: true }, raw: bytes(tar), headers, signal: options.signal, once: true };
    return (await this.#context.transport.call("putFile", call)) as FileInfo;
  }

  /** readTree yields the entries of a tree. The guest controls them: names may be anything. */
  readTree(path: string, options: TarLimits & CallOptions = {}): AsyncGenerator<TarEntry, void, void> {
    return readTar(this.downloadTar(path, options), options);
  }

  /** writeTree writes files, directories and links below a directory, in one request. */
  writeTree(dir: string, entries: AsyncIterable<NewEntry> | Iterable<NewEntry>, options: CallOptions = {}): Promise<FileInfo> {
    return this.uploadTar(dir, writeTar(entries), options);
  }

  /**
   * copyTo copies a local file or tree into the workspace, by the rules of cp -r: into `remote` if that is a directory,
   * else to that name. It returns how many bytes of content were sent. Only where there is a file system.
   */
  async copyTo(local: string, remote: string, options: CallOptions = {}): Promise<number> {
    const disk = this.#disk();
    const kind = await disk.kind(local);
    if (kind === "none") throw new CoppiceError("INVALID_FIELD", `copy ${local}: there is no such file`);
    const contents = /(^|[\\/])\.?$/.test(local);
    const base = local.replace(/[\\/]+$/, "").split(/[\\/]/).pop() ?? "";
    const there = await this.#kind(remote, options);
    if (there === "dir" && !(kind === "dir" && contents)) remote = `${remote.replace(/\/+$/, "")}/${base}`;
    else if (kind === "dir" && there !== "none" && there !== "dir") throw new CoppiceError("INVALID_FIELD", `copy to ${remote}: it is not a directory, and ${local} is`);
    else if (kind !== "dir" && remote.endsWith("/")) throw new CoppiceError("INVALID_FIELD", `copy to ${remote}: there is no such directory`);
    if (kind === "dir") {
      const packed = disk.pack(local, options.signal);
      await this.uploadTar(remote, packed.body, options);
      return packed.sent();
    }
    const file = await disk.load(local);
    await this.write(remote, file.body, { mode: file.mode, ...options });
    return file.size;
  }

  /**
   * copyFrom copies a file or tree out of the workspace to a local path, by the rules of cp -r. The guest controls what
   * is in it, so nothing is written outside of `local`: links on the way are replaced and never followed, links that
   * lead outside are left out, and bytes and entries are bounded. Only where there is a file system.
   */
  async copyFrom(remote: string, local: string, options: CopyLimits & CallOptions = {}): Promise<Copied> {
    const disk = this.#disk();
    const contents = remote.endsWith("/.");
    const clean = remote.replace(/\/\.$/, "").replace(/\/+$/, "") || "/";
    const base = clean === "/" ? "" : (clean.split("/").pop() ?? "");
    const info = await this.stat(clean, options);
    const there = await disk.kind(local);
    if (info.type === "dir") {
      if (there !== "none" && there !== "dir") throw new CoppiceError("INVALID_FIELD", `copy to ${local}: it is not a directory, and ${remote} is`);
      return disk.unpack(this.downloadTar(clean, options), base, there === "dir" && !contents && base ? `${local.replace(/[\\/]+$/, "")}/${safeName(base)}` : local, options);
    }
    if (there === "none" && /[\\/]$/.test(local)) throw new CoppiceError("INVALID_FIELD", `copy to ${local}: there is no such directory`);
    const file = await this.open(clean, options);
    const mode = parseInt(info.mode, 8) & 0o777;
    return disk.save(file.body, there === "dir" ? `${local.replace(/[\\/]+$/, "")}/${safeName(base)}` : local, Number.isNaN(mode) ? 0o644 : mode, options);
  }

  #disk(): Disk {
    if (!this.#context.disk) throw new CoppiceError("NOT_HERE", "this runtime has no file system");
    return this.#context.disk;
  }

  async #kind(path: string, options: CallOptions): Promise<FileInfo["type"] | "none"> {
    try {
      return (await this.stat(path, options)).type;
    } catch (error) {
      if (isCode(error, "FILE_NOT_FOUND")) return "none";
      throw error;
    }
  }

  #get(path: string, flags: { tar?: boolean }, options: CallOptions): Promise<WireAnswer> {
    return this.#context.transport.stream("getFile", { path: this.#path(), query: { path, ...flags }, signal: options.signal });
  }

  #path(): { workspace_id: string } {
    return { workspace_id: this.#id };
  }
}

/** safeName refuses the last element of a path that would lead elsewhere. */
function safeName(base: string): string {
  if (base === "" || base === "." || base === ".." || base.includes("\\")) throw new CoppiceError("INVALID_FIELD", `copy ${base}: name the local file`);
  return base;
}
