package main

import (
	"context"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

func (f *fake) CollectStore(_ context.Context, r api.CollectStoreRequestObject) (api.CollectStoreResponseObject, error) {
	f.note(r.Params.DryRun)
	f.mu.Lock()
	defer f.mu.Unlock()
	return api.CollectStore200JSONResponse{
		DryRun: r.Params.DryRun, Condemned: 1, Waiting: 2, Objects: 3, Bytes: 4 << 20, DebrisWaiting: 5, DebrisObjects: 6, DebrisBytes: 7 << 20, More: len(f.requests) < 2,
	}, nil
}

func (f *fake) CheckStore(context.Context, api.CheckStoreRequestObject) (api.CheckStoreResponseObject, error) {
	out := api.CheckStore200JSONResponse{Sound: !f.failChild, Objects: 5, Bytes: 6 << 20, Uploading: 7, Debris: 8, Missing: []api.StoreObject{}, Resized: []api.StoreObject{}, Foreign: []api.StoreObject{}}
	if f.failChild {
		out.Missing = append(out.Missing, api.StoreObject{Key: "v1/a", Bytes: 1 << 10})
		out.Foreign, out.Truncated = append(out.Foreign, api.StoreObject{Key: "v1/b\x1b", Bytes: 2 << 10}), true
	}
	return out, nil
}

func (f *fake) CheckStoreData(_ context.Context, r api.CheckStoreDataRequestObject) (api.CheckStoreDataResponseObject, error) {
	f.note(r.Params)
	out := api.CheckStoreData200JSONResponse{Checkpoints: 2, Frames: 10, Bytes: 1 << 20, Problems: []api.StoreProblem{}}
	if f.failChild {
		out.Problems = append(out.Problems, api.StoreProblem{Object: "v1/p/c/1/pack-0", Code: "CHECKPOINT_CORRUPT", Message: "not what was stored\x1b", Checkpoints: []string{"ckpt_a", "ckpt_b"}, NeededBy: 5})
	}
	if r.Params.After == "" {
		out.Next, out.Remaining = "more", 1
	}
	return out, nil
}

func TestStoreCommands(t *testing.T) {
	t.Parallel()
	f, run := newFake(t)
	for _, c := range []struct {
		line   string
		unwell bool
		status int
		out    string
		sent   int
	}{
		{"store gc --dry-run", false, 0, "3 objects (4.0 MiB) of deleted checkpoints to remove, 2 more wait for the end of their grace period, 1 are newly unreferenced\n" +
			"6 objects (7.0 MiB) of abandoned uploads to remove, 5 more uploads wait\n", 1},
		{"store gc", false, 0, "6 objects (8.0 MiB) of deleted checkpoints removed, 2 more wait for the end of their grace period, 2 are newly unreferenced\n" +
			"12 objects (14.0 MiB) of abandoned uploads removed, 5 more uploads wait\n", 2}, // the first request did not get done
		{"store check", false, 0, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n", 0},
		{"store check", true, 1, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"missing     v1/a (1.0 KiB)\nforeign     v1/b\\x1b (2.0 KiB)\nand more\n", 0},
		{"store check --read-data-subset=3/10", false, 0, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"20 frames (2.0 MiB) of 4 checkpoints, part 3/10, were read and are correct\n", 2},
		{"store check --read-data-subset=100%", true, 1, "5 objects (6.0 MiB) are present; 7 of uploads under way, 8 to be removed\n" +
			"missing     v1/a (1.0 KiB)\nforeign     v1/b\\x1b (2.0 KiB)\nand more\n20 frames (2.0 MiB) of 4 checkpoints, part 1/1, were read and are correct\n" +
			"CHECKPOINT_CORRUPT  v1/p/c/1/pack-0: not what was stored\\x1b\n  needed by ckpt_a, ckpt_b and 3 more\n", 2},
		{"store check --read-data-subset=11/10", false, 2, "", 0},
	} {
		f.requests, f.failChild = nil, c.unwell
		status, stdout, stderr := run(strings.Fields(c.line)...)
		if status != c.status || stdout != c.out || len(f.requests) != c.sent {
			t.Errorf("%s: status %d, %d requests\n%s%s", c.line, status, len(f.requests), stdout, stderr)
		}
	}
}

func TestParseSubset(t *testing.T) {
	t.Parallel()
	for text, of := range map[string]int{"1/1": 1, "7/10": 10, "100%": 1, "10%": 10, "33%": 3, "0.5%": 200, "0.0001%": 1_000_000} {
		if got, err := parseSubset(text); err != nil || got.Of != of || got.Which < 1 || got.Which > of {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"0/1", "2/1", "1", "1/", "/1", "x/2", "-1/2", "1/10000000", "0%", "101%", "-1%", "NaN%", "%", "0.00001%"} {
		if got, err := parseSubset(text); err == nil {
			t.Errorf("%s: %+v", text, got)
		}
	}
}
