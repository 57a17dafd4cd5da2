package fleet

import (
	"context"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

const (
	placeLooks   = 32 // how many of the emptiest runners are offered to a request at first
	placeFactor  = 64 // how many times as many it is offered next, while those before have no room
	placeHolders = 64 // if fewer runners than this have the image, only these are offered
)

// EmptiestFilter says which runners are of interest.
type EmptiestFilter struct {
	Limit   int
	Class   *runnerapi.RunnerClass // nil: any
	Images  []core.ImageID         // those that have one of these; empty: any
	NotFull bool                   // with something free in every dimension
	Fits    *core.Resources        // those that, empty, have room for one of these; nil: any
	Fresh   bool                   // with a lease
}

// PlaceTx is what placement needs of the transaction that inserts sandboxes.
type PlaceTx interface {
	// LoadedRunners returns those of the runners that were not given up, each with its load.
	LoadedRunners(ctx context.Context, ids []core.RunnerID) ([]model.Runner, error)
	// EmptiestRunners returns runners that take new sandboxes, the emptiest first, each with its load. It compares loads in sixteenths.
	EmptiestRunners(ctx context.Context, f EmptiestFilter) ([]model.Runner, error)
	// ImageHolders returns the rows of an image and at most limit runners that have it.
	ImageHolders(ctx context.Context, image core.Digest, limit int) ([]core.ImageID, []core.RunnerID, error)
	// Occupied says what is placed on a runner on which this transaction has inserted sandboxes, including these. Until the transaction
	// ends, no other one can place or end sandboxes there, so the answer stays true.
	Occupied(ctx context.Context, runner core.RunnerID) (runnerapi.Capacity, error)
}

// Place chooses a runner for each requested sandbox from the fleet that the transaction sees; see placement.Spread.
func Place(ctx context.Context, tx PlaceTx, req placement.Request, even bool) ([]model.Runner, error) {
	o := &offer{tx: tx, req: req, even: even}
	return o.choose(ctx)
}

// offer is the part of the fleet from which placement chooses. It is never larger than needed, however many runners there are.
type offer struct {
	tx     PlaceTx
	req    placement.Request
	even   bool
	images []core.ImageID // the rows of the image that runners must have

	fleet []model.Runner
	known map[core.RunnerID]bool // that are in the fleet
	has   map[core.RunnerID]bool // the image
}

func (o *offer) add(list []model.Runner, has bool) {
	if o.known == nil {
		o.known, o.has = map[core.RunnerID]bool{}, map[core.RunnerID]bool{}
	}
	for _, r := range list {
		id := r.Info.RunnerID
		if !o.known[id] {
			o.known[id] = true
			o.fleet = append(o.fleet, r)
		}
		o.has[id] = o.has[id] || has
	}
}

// choose offers more and more of the fleet until there is room. First come the runners that must be offered, or are near. Then
// come the emptiest ones: they have room unless hardly any runner has.
func (o *offer) choose(ctx context.Context) ([]model.Runner, error) {
	only, err := o.begin(ctx)
	if err != nil {
		return nil, err
	}
	if only {
		return o.chooseHolder(ctx)
	}
	for limit := max(placeLooks, o.req.Count); ; limit *= placeFactor {
		more, err := o.tx.EmptiestRunners(ctx, EmptiestFilter{Limit: limit, Class: o.req.Class, Images: o.images, NotFull: true, Fresh: o.even})
		if err != nil {
			return nil, err
		}
		o.add(more, true)
		if list, err := o.spread(); err == nil {
			return list, nil
		}
		if len(more) < limit {
			return o.refuse(ctx)
		}
	}
}

// begin offers the runners that must or should be offered, and says whether no others may be.
func (o *offer) begin(ctx context.Context) (only bool, err error) {
	var ids []core.RunnerID
	has := false
	switch {
	case o.req.Holder != "":
		ids, only = []core.RunnerID{o.req.Holder}, true
	case o.req.Image != "":
		images, holders, err := o.tx.ImageHolders(ctx, o.req.Image, placeHolders+1)
		if err != nil {
			return false, err
		}
		if len(holders) > placeHolders {
			o.images = images
			return false, nil
		}
		ids, only, has = holders, true, true
	default:
		ids = slices.Sorted(maps.Keys(o.req.Near))
	}
	if len(ids) == 0 {
		return only, nil
	}
	list, err := o.tx.LoadedRunners(ctx, ids)
	o.add(list, has)
	return only, err
}

// chooseHolder chooses among the offered runners that have what is needed. If none of them takes sandboxes, the error says whether others do.
func (o *offer) chooseHolder(ctx context.Context) ([]model.Runner, error) {
	list, err := o.spread()
	if core.CodeOf(err) != core.CodeNoRunner || o.req.Image == "" {
		return list, err
	}
	more, err := o.tx.EmptiestRunners(ctx, EmptiestFilter{Limit: 1, Fresh: true})
	if err != nil {
		return nil, err
	}
	o.add(more, false)
	return o.spread()
}

// refuse finds out why there is no room, and needs only a few runners for this. It takes runners that would have room if they were empty: as
// many of them as there are requested sandboxes distinguish a full cluster from one that is too small. If there are none, it takes runners of
// the class, otherwise any runners.
func (o *offer) refuse(ctx context.Context) ([]model.Runner, error) {
	limit := max(placeLooks, o.req.Count)
	for _, f := range []EmptiestFilter{
		{Limit: limit, Class: o.req.Class, Images: o.images, Fresh: true, Fits: &o.req.Resources},
		{Limit: limit, Class: o.req.Class, Images: o.images, Fresh: true},
		{Limit: limit, Fresh: true},
	} {
		more, err := o.tx.EmptiestRunners(ctx, f)
		if err != nil {
			return nil, err
		}
		if len(more) > 0 {
			o.fleet, o.known = nil, nil // the reason comes from these runners alone; those before had no room
			o.add(more, len(f.Images) > 0)
			break
		}
	}
	return o.spread()
}

// spread chooses among the offered runners.
func (o *offer) spread() ([]model.Runner, error) {
	candidates := make([]placement.Runner, len(o.fleet))
	at := make(map[core.RunnerID]int, len(o.fleet))
	for i, r := range o.fleet {
		at[r.Info.RunnerID] = i
		candidates[i] = placement.Runner{
			ID: r.Info.RunnerID, Class: r.Info.Class, Fresh: r.Fresh, Draining: r.Draining, Capacity: r.Info.Capacity, Used: r.Used,
			DiskFreeMB: r.Info.DiskFreeMB,
		}
		if o.has[r.Info.RunnerID] {
			candidates[i].Images = []core.Digest{o.req.Image}
		}
	}
	ids, err := placement.Spread(candidates, o.req, o.even)
	if err != nil {
		return nil, err
	}
	chosen := make([]model.Runner, len(ids))
	for i, id := range ids {
		chosen[i] = o.fleet[at[id]]
		chosen[i].Chosen = o.req
	}
	return chosen, nil
}

// Occupy checks, after the rows are inserted, that the chosen runners have room for them. Another
// request, here or on another controller, may have chosen the same runners at the same time.
func Occupy(ctx context.Context, tx PlaceTx, runners ...model.Runner) error {
	seen := map[core.RunnerID]bool{}
	for _, r := range runners {
		if seen[r.Info.RunnerID] {
			continue
		}
		seen[r.Info.RunnerID] = true
		used, err := tx.Occupied(ctx, r.Info.RunnerID)
		if err != nil {
			return err
		}
		if err := placement.Fits(placement.Runner{ID: r.Info.RunnerID, Capacity: r.Info.Capacity, Used: used}, r.Chosen); err != nil {
			return err
		}
	}
	return nil
}
