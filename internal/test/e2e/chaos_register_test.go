package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The annotations of a checkpoint are changed by compare-and-set on its version, by many at once and through any controller. While all
// else goes on, clients read and write one value of each seed; porcupine then says whether some order of these requests, each at one
// moment between its beginning and its end, explains every answer.

const (
	registerClients = 3
	registerPause   = 150 * time.Millisecond
	registerName    = "register"
)

type registerInput struct {
	checkpoint coppice.CheckpointID
	write      bool
	version    int64 // expected
	value      float64
}

type registerOutput struct {
	answered, conflict bool
	version            int64
	value              float64
}

// registerState is a value with a version that the caller of a write must know. The zero value is not known yet.
type registerState struct {
	version int64
	value   float64
}

var registerModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		parts := map[coppice.CheckpointID][]porcupine.Operation{}
		for _, op := range history {
			id := op.Input.(registerInput).checkpoint
			parts[id] = append(parts[id], op)
		}
		return slices.Collect(maps.Values(parts))
	},
	Init: func() any { return registerState{} },
	Step: func(state, input, output any) (bool, any) {
		now, in, out := state.(registerState), input.(registerInput), output.(registerOutput)
		seen := registerState{out.version, out.value}
		switch {
		case !in.write:
			return now == registerState{} || now == seen, seen
		case out.conflict:
			return now.version != in.version, now
		}
		return now.version == in.version && seen == registerState{in.version + 1, in.value}, seen
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// settleWrites finds out which writes without an answer were carried out: each version comes of one write, and whoever went on from it
// had seen it.
func settleWrites(all []porcupine.Operation) (settled []porcupine.Operation) {
	type place struct {
		id      coppice.CheckpointID
		version int64
	}
	type sighting struct {
		value float64
		by    int64
	}
	first := map[place]sighting{}
	for _, op := range all {
		in, out := op.Input.(registerInput), op.Output.(registerOutput)
		at := place{in.checkpoint, out.version}
		if before, seen := first[at]; out.answered && !out.conflict && (!seen || op.Return < before.by) {
			first[at] = sighting{out.value, op.Return}
		}
	}
	for _, op := range all {
		in, out := op.Input.(registerInput), op.Output.(registerOutput)
		if out.answered {
			settled = append(settled, op)
			continue
		}
		if s, seen := first[place{in.checkpoint, in.version + 1}]; seen && s.value == in.value {
			op.Output, op.Return = registerOutput{answered: true, version: in.version + 1, value: in.value}, max(s.by, op.Call)
			settled = append(settled, op)
		}
	}
	return settled
}

// register starts the clients. What it returns waits for their end.
func (x *chaos) register(ctx context.Context, seeds []seedling) func() []porcupine.Operation {
	var mu sync.Mutex // guards all
	var all []porcupine.Operation
	var group sync.WaitGroup
	for i := range registerClients {
		rng := rand.New(rand.NewPCG(x.seed, uint64(1000+i)))
		group.Go(func() {
			known := map[coppice.CheckpointID]int64{}
			tick := time.NewTicker(registerPause)
			defer tick.Stop()
			for n := 0; ctx.Err() == nil; n++ {
				id := seeds[rng.IntN(len(seeds))].id
				in := registerInput{checkpoint: id, write: known[id] > 0 && rng.IntN(2) == 0, version: known[id], value: float64(n*registerClients + i + 1)}
				op := porcupine.Operation{ClientId: i, Input: in, Call: time.Since(x.begun).Nanoseconds()}
				out := x.access(x.any(rng), in)
				op.Output, op.Return = out, time.Since(x.begun).Nanoseconds()
				known[id] = out.version // 0 where it is to be read again
				if out.answered || in.write {
					mu.Lock()
					all = append(all, op)
					mu.Unlock()
				}
				select {
				case <-ctx.Done():
				case <-tick.C:
				}
			}
		})
	}
	return func() []porcupine.Operation {
		group.Wait()
		return all
	}
}

func (x *chaos) access(client *coppice.Client, in registerInput) (out registerOutput) {
	ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Second)
	defer cancel()
	var c coppice.Checkpoint
	var err error
	if in.write {
		c, err = client.PatchCheckpoint(ctx, in.checkpoint, coppice.PatchCheckpointRequest{Version: in.version, Annotations: coppice.Annotations{registerName: in.value}})
	} else {
		c, err = client.Checkpoint(ctx, in.checkpoint)
	}
	var refused *coppice.Error
	switch {
	case err == nil:
		value, _ := c.Annotations[registerName].(float64)
		return registerOutput{answered: true, version: c.Version, value: value}
	case errors.As(err, &refused) && refused.Status == 409:
		return registerOutput{answered: true, conflict: true}
	}
	return registerOutput{}
}

// checkRegisters wants the answers to have an explanation.
func (x *chaos) checkRegisters(all []porcupine.Operation) {
	x.t.Helper()
	const patience = time.Minute
	settled := settleWrites(all)
	began := time.Now()
	switch porcupine.CheckOperationsTimeout(registerModel, settled, patience) {
	case porcupine.Ok:
	case porcupine.Illegal:
		x.t.Error("no order of the reads and writes of annotations explains their answers:")
		for _, op := range settled {
			x.t.Logf("client %d, %.3f to %.3f s: %s", op.ClientId, float64(op.Call)/1e9, float64(op.Return)/1e9, registerModel.DescribeOperation(op.Input, op.Output))
		}
	default:
		x.t.Errorf("whether %d reads and writes of annotations have an order was not found out in %s", len(settled), patience)
	}
	x.t.Logf("%d reads and writes of annotations are linearizable (found in %.1f s); of %d more nobody saw that they were carried out",
		len(settled), time.Since(began).Seconds(), len(all)-len(settled))
}

// TestRegisterModel shows that the check of annotations would find what is wrong.
func TestRegisterModel(t *testing.T) {
	t.Parallel()
	read := func(client int, at, version int64, value float64) porcupine.Operation {
		return porcupine.Operation{ClientId: client, Call: at, Return: at + 5, Input: registerInput{}, Output: registerOutput{true, false, version, value}}
	}
	write := func(client int, at, version int64, value float64, out registerOutput) porcupine.Operation {
		return porcupine.Operation{ClientId: client, Call: at, Return: at + 5, Input: registerInput{write: true, version: version, value: value}, Output: out}
	}
	refused := registerOutput{answered: true, conflict: true}
	for _, c := range []struct {
		name string
		want bool
		ops  []porcupine.Operation
	}{
		{"one after the other", true, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{true, false, 2, 7}), read(1, 20, 2, 7), write(1, 30, 1, 8, refused)}},
		{"at once, one wins", true, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{true, false, 2, 7}), write(1, 11, 1, 8, refused)}},
		{"both win", false, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{true, false, 2, 7}), write(1, 11, 1, 8, registerOutput{true, false, 2, 8})}},
		{"a stale read", false, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{true, false, 2, 7}), read(1, 20, 1, 0)}},
		{"a lost write", false, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{true, false, 2, 7}), read(1, 20, 2, 0)}},
		{"refused for nothing", false, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, refused)}},
		{"carried out although nobody was told", true, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{}), read(1, 20, 2, 7)}},
		{"not carried out, and nobody was told", true, []porcupine.Operation{read(0, 0, 1, 0), write(0, 10, 1, 7, registerOutput{}), read(1, 20, 1, 0)}},
		{"carried out before it was asked for", false, []porcupine.Operation{read(0, 0, 1, 0), read(1, 2, 2, 7), write(0, 10, 1, 7, registerOutput{})}},
	} {
		if got := porcupine.CheckOperations(registerModel, settleWrites(c.ops)); got != c.want {
			t.Errorf("%s: linearizable is %t, want %t", c.name, got, c.want)
		}
	}
}
