package main

import (
	"context"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

func fakeRunner(n int, state api.RunnerState) api.Runner {
	return api.Runner{
		ID: fakeID("rnr", n), Hostname: "host", State: state, Capacity: api.Capacity{Sandboxes: 64, VCPUs: 128, MemoryMiB: 4096}, Allocated: api.Capacity{Sandboxes: n, VCPUs: 2 * n, MemoryMiB: 512 * n},
		DiskFreeMB: 10 << 10, Class: api.RunnerClass{VMM: "qemu", VMMVersion: "10.0", Accelerator: "tcg"}, StartedAt: dawn, HeartbeatAt: dawn,
	}
}

func (f *fake) ListRunners(context.Context, api.ListRunnersRequestObject) (api.ListRunnersResponseObject, error) {
	return api.ListRunners200JSONResponse{Items: []api.Runner{fakeRunner(2, api.RunnerDraining), fakeRunner(1, api.RunnerReady)}}, nil
}

func (f *fake) PatchRunner(_ context.Context, r api.PatchRunnerRequestObject) (api.PatchRunnerResponseObject, error) {
	state := api.RunnerReady
	if r.Body.Draining {
		state = api.RunnerDraining
	}
	return api.PatchRunner200JSONResponse(fakeRunner(3, state)), nil
}

func TestFleetCommands(t *testing.T) {
	t.Parallel()
	_, run := newFake(t)
	for line, want := range map[string]string{
		"fleet ls":                          fakeID("rnr", 2) + "  host  draining  2/64       4/128  1024/4096  10.0 GiB   qemu 10.0  tcg",
		"fleet drain " + fakeID("rnr", 3):   fakeID("rnr", 3) + " is draining, with 3 sandboxes\n",
		"fleet undrain " + fakeID("rnr", 3): fakeID("rnr", 3) + " is ready, with 3 sandboxes\n",
	} {
		if status, stdout, stderr := run(strings.Fields(line)...); status != 0 || !strings.Contains(stdout, want) {
			t.Errorf("%s: status %d\n%s%s", line, status, stdout, stderr)
		}
	}
}
