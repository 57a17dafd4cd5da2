import { readdirSync, readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { routes } from "../src/gen/routes.js";

/** Operations that the client does not call by their name, and why. */
const reasons: Record<string, string> = {
  attach: "a WebSocket at the address that attachSession gives",
  terminateWorkspace: "the same as deleteWorkspace",
  createFilesPass: "a runner's data plane has a certificate that fetch cannot be told to trust; files go through the server",
};

test("every operation of the contract is called, or has a reason", () => {
  const dir = new URL("../src/", import.meta.url);
  const source = readdirSync(dir)
    .filter((name) => name.endsWith(".ts"))
    .map((name) => readFileSync(new URL(name, dir), "utf8"))
    .join("\n");
  const missing = Object.keys(routes).filter((name) => !source.includes(`"${name}"`));
  expect(missing.sort()).toEqual(Object.keys(reasons).sort());
});

test("the browser's entry reaches no module of Node.js", () => {
  const seen = new Set<string>();
  const visit = (file: URL): void => {
    if (seen.has(file.href)) return;
    seen.add(file.href);
    for (const [, target = ""] of readFileSync(file, "utf8").matchAll(/from "([^"]+)"/g)) {
      if (target.startsWith("./")) visit(new URL(target.replace(/\.js$/, ".ts"), file));
      else expect(target, file.pathname).toMatch(/^@noble\/hashes\//);
    }
  };
  visit(new URL("../src/browser.ts", import.meta.url));
  expect(seen.size).toBeGreaterThan(10);
});
