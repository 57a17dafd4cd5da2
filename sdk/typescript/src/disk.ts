import { randomUUID } from "node:crypto";
import { createReadStream } from "node:fs";
import * as fs from "node:fs/promises";
import * as path from "node:path";
import type { Copied, CopyLimits, Disk } from "./context.js";
import { CoppiceError } from "./errors.js";
import { defaultMaxBytes, type NewEntry, readTar, type TarEntry, writeTar } from "./tar.js";

/** The file system of Node.js. */
export const disk: Disk = { pack, unpack, save, load, kind };

async function kind(local: string): Promise<"dir" | "file" | "none" | "other"> {
  try {
    const info = await fs.stat(local);
    return info.isDirectory() ? "dir" : info.isFile() ? "file" : "other";
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return "none";
    throw error;
  }
}

async function load(local: string): Promise<{ body: AsyncIterable<Uint8Array>; size: number; mode: string }> {
  const info = await fs.stat(local);
  if (!info.isFile()) throw new CoppiceError("INVALID_FIELD", `copy ${local}: it is neither a file nor a directory`);
  return { body: createReadStream(local), size: info.size, mode: (info.mode & 0o777).toString(8).padStart(4, "0") };
}

function pack(local: string, signal?: AbortSignal): { body: AsyncIterable<Uint8Array>; sent: () => number } {
  let sent = 0;
  async function* entries(dir: string, prefix: string): AsyncGenerator<NewEntry, void, void> {
    for (const item of (await fs.readdir(dir, { withFileTypes: true })).sort((a, b) => (a.name < b.name ? -1 : 1))) {
      signal?.throwIfAborted();
      const whole = path.join(dir, item.name);
      const name = prefix + item.name;
      const info = await fs.lstat(whole);
      const common = { name, mode: info.mode & 0o7777, mtime: info.mtimeMs / 1000 };
      if (info.isSymbolicLink()) {
        yield { ...common, type: "symlink", target: await fs.readlink(whole) };
      } else if (info.isDirectory()) {
        yield { ...common, type: "dir" };
        yield* entries(whole, `${name}/`);
      } else if (info.isFile()) {
        yield { ...common, type: "file", data: { size: info.size, chunks: info.size > 0 ? createReadStream(whole, { end: info.size - 1 }) : nothing() } };
        sent += info.size;
      } else {
        throw new CoppiceError("INVALID_FIELD", `copy ${whole}: it is neither a file, a directory nor a symbolic link`);
      }
    }
  }
  return { body: writeTar(entries(local, "")), sent: () => sent };
}

async function* nothing(): AsyncGenerator<Uint8Array, void, void> {
  // An empty file.
}

/** save writes a file under a temporary name and moves it to its place. A link there is replaced, not followed. */
async function save(body: AsyncIterable<Uint8Array>, local: string, mode: number, limits: CopyLimits): Promise<Copied> {
  const temporary = path.join(path.dirname(local), `.coppice-${randomUUID()}`);
  try {
    const bytes = await write(temporary, body, mode, limits.maxBytes ?? defaultMaxBytes);
    await fs.rename(temporary, local);
    return { bytes, leftOut: 0 };
  } catch (error) {
    await fs.rm(temporary, { force: true });
    throw error;
  }
}

/** write makes a new file, which must not exist, not even as a link. */
async function write(local: string, body: AsyncIterable<Uint8Array>, mode: number, most: number, mtime?: number): Promise<number> {
  const file = await fs.open(local, "wx", mode & 0o777);
  let size = 0;
  try {
    for await (const chunk of body) {
      size += chunk.length;
      if (size > most) throw new CoppiceError("LIMIT_EXCEEDED", `${local}: the copied data exceeds the bound`);
      for (let at = 0; at < chunk.length; ) at += (await file.write(chunk, at)).bytesWritten;
    }
    if (mtime !== undefined) await file.utimes(mtime, mtime);
  } finally {
    await file.close();
  }
  return size;
}

/** unpack writes a tree below a directory. The caller has chosen the directory itself, so links in its path are followed. */
async function unpack(body: AsyncIterable<Uint8Array>, base: string, local: string, limits: CopyLimits): Promise<Copied> {
  await fs.mkdir(local, { recursive: true });
  const tree = new Tree(await fs.realpath(local));
  const modes: { name: string; mode: number }[] = []; // of directories: set last, because a read-only one could not be filled
  for await (const entry of readTar(body, limits)) {
    const name = below(base, entry.name);
    if (name === "") continue;
    if (!(await tree.add(entry, name, below(base, entry.target)))) continue;
    if (entry.type === "dir") modes.push({ name, mode: entry.mode & 0o777 });
  }
  for (const { name, mode } of modes.reverse()) {
    if (await tree.isReal(name, "dir")) await fs.chmod(tree.local(name), mode);
  }
  return { bytes: tree.bytes, leftOut: tree.leftOut };
}

/** below is a name of the archive relative to base; empty for base itself. It never leads upward. */
export function below(base: string, name: string): string {
  const clean = path.posix.normalize(`/${name}`).replace(/^\/+/, "").replace(/\/+$/, "");
  if (base === "" || clean === base) return clean === base ? "" : clean;
  return clean.startsWith(`${base}/`) ? clean.slice(base.length + 1) : clean;
}

/** Tree is a directory into which a guest's files are written. */
class Tree {
  readonly #root: string;
  bytes = 0;
  leftOut = 0;

  constructor(root: string) {
    this.#root = root;
  }

  local(name: string): string {
    return path.join(this.#root, ...name.split("/"));
  }

  /** add writes one entry; false if it was left out. */
  async add(entry: TarEntry, name: string, target: string): Promise<boolean> {
    if (!nameable(name)) return this.#leave();
    switch (entry.type) {
      case "dir":
        await this.#directories(name);
        return true;
      case "file":
        await this.#directories(path.posix.dirname(name));
        await this.#clear(name);
        this.bytes += await write(this.local(name), entry.body, entry.mode, entry.size, entry.mtime);
        return true;
      case "symlink":
        if (leadsOutside(name, entry.target)) return this.#leave();
        await this.#directories(path.posix.dirname(name));
        await this.#clear(name);
        await fs.symlink(entry.target, this.local(name));
        return true;
      case "link":
        // Only a regular file of this tree may get another name.
        if (!nameable(target) || !(await this.isReal(target, "file")) || (await this.#same(target, name))) return this.#leave();
        await this.#directories(path.posix.dirname(name));
        if (!(await this.isReal(target, "file"))) return this.#leave();
        await this.#clear(name);
        await fs.link(this.local(target), this.local(name));
        return true;
      default: // devices and pipes have no meaning outside of the guest
        return this.#leave();
    }
  }

  #leave(): boolean {
    this.leftOut++;
    return false;
  }

  /** isReal reports whether a name is a file or directory and no element above it is a link. */
  async isReal(name: string, want: "file" | "dir"): Promise<boolean> {
    const elements = name.split("/");
    for (let i = 1; i <= elements.length; i++) {
      const info = await look(this.local(elements.slice(0, i).join("/")));
      if (!info) return false;
      if (i < elements.length || want === "dir" ? !info.isDirectory() : !info.isFile()) return false;
    }
    return true;
  }

  /** same reports whether two names are one file, as on a disk that does not tell upper from lower case. */
  async #same(a: string, b: string): Promise<boolean> {
    const [one, other] = [await look(this.local(a)), await look(this.local(b))];
    return one !== undefined && other !== undefined && one.ino === other.ino && one.dev === other.dev;
  }

  /**
   * directories makes sure that every element of a name is a directory and not a link to one. It looks at the disk for
   * every entry: only the disk knows which names are the same to it.
   */
  async #directories(name: string): Promise<void> {
    if (name === "." || name === "") return;
    const elements = name.split("/");
    for (let i = 1; i <= elements.length; i++) {
      const whole = this.local(elements.slice(0, i).join("/"));
      const info = await look(whole);
      if (info?.isDirectory()) continue;
      if (info) await fs.unlink(whole);
      await fs.mkdir(whole, 0o700);
      await fs.chmod(whole, i === elements.length ? 0o700 : 0o755);
    }
  }

  /** clear removes what is in the way of a file or link. A directory stays, and the write fails. */
  async #clear(name: string): Promise<void> {
    const info = await look(this.local(name));
    if (info && !info.isDirectory()) await fs.unlink(this.local(name));
  }
}

async function look(local: string): Promise<{ isDirectory(): boolean; isFile(): boolean; ino: bigint; dev: bigint } | undefined> {
  try {
    return await fs.lstat(local, { bigint: true });
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
    throw error;
  }
}

/** nameable reports whether a name means the same to this machine as to the guest. */
export function nameable(name: string, platform: string = process.platform): boolean {
  if (name === "" || name.includes("\0")) return false;
  return platform !== "win32" || name.split("/").every((element) => !/[\\:*?"<>|]|[. ]$/.test(element));
}

/**
 * leadsOutside reports whether a symbolic link may lead out of its tree. The link's own directory is real, so leading
 * ".." elements are reliable. Any later ".." may follow another link, so the link counts as leading outside.
 */
export function leadsOutside(name: string, target: string): boolean {
  if (target === "" || path.posix.isAbsolute(target) || path.win32.isAbsolute(target) || /[\\:]/.test(target)) return true;
  let up = 0;
  let down = false;
  for (const element of target.split("/")) {
    if (element === "" || element === ".") continue;
    if (element !== "..") down = true;
    else if (down) return true;
    else up++;
  }
  return up > name.split("/").length - 1;
}
