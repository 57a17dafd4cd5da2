// Runs the tests of E2B's JavaScript package that need a server: those of its folders sandbox and api. Machines without KVM are slower than
// E2B's, so a test may take four minutes.

import { defineConfig } from 'vitest/config'

export default defineConfig({
  test: {
    include: (process.env.TESTS ?? 'tests/sandbox tests/api').split(/\s+/).map((at) => (at.endsWith('.ts') ? at : `${at}/**/*.test.ts`)),
    setupFiles: ['tests/globalFetchFallback.setup.ts'],
    testTimeout: 240_000,
    hookTimeout: 240_000,
    maxWorkers: 3,
    environment: 'node',
    isolate: true,
    deps: { interopDefault: true },
  },
})
