import { defineConfig } from "vitest/config";

// The client under test is the source, or, with SDK_PACKAGE, a package that was installed from its tarball there.
const installed = process.env["SDK_PACKAGE"];
const client = installed ? `${installed}/dist/node.js` : new URL("src/node.ts", import.meta.url).pathname;

export default defineConfig({
  resolve: { alias: { "@coppice/sdk": client } },
  test: {
    include: ["tests/**/*.test.ts"],
    // A busy machine is slow: only what hangs is to fail.
    testTimeout: 300_000,
    hookTimeout: 600_000,
    pool: "forks",
    maxWorkers: 2,
  },
});
