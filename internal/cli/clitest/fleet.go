package clitest

import (
	"context"

	"github.com/coppice-dev/coppice/api"
)

func runner(n int, state api.RunnerState) api.Runner {
	return api.Runner{
		ID: ID("rnr", n), Hostname: "host", State: state, Capacity: api.Capacity{Sandboxes: 64, VCPUs: 128, MemoryMiB: 4096}, Allocated: api.Capacity{Sandboxes: n, VCPUs: 2 * n, MemoryMiB: 512 * n},
		DiskFreeMB: 10 << 10, Class: api.RunnerClass{VMM: "qemu", VMMVersion: "10.0", Accelerator: "tcg"}, StartedAt: Dawn, HeartbeatAt: Dawn,
	}
}

func (f *Server) ListRunners(context.Context, api.ListRunnersRequestObject) (api.ListRunnersResponseObject, error) {
	return api.ListRunners200JSONResponse{Items: []api.Runner{runner(2, api.RunnerDraining), runner(1, api.RunnerReady)}}, nil
}

func (f *Server) PatchRunner(_ context.Context, r api.PatchRunnerRequestObject) (api.PatchRunnerResponseObject, error) {
	state := api.RunnerReady
	if r.Body.Draining {
		state = api.RunnerDraining
	}
	return api.PatchRunner200JSONResponse(runner(3, state)), nil
}
