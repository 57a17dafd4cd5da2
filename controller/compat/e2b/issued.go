package e2b

import (
	"slices"
	"sync"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The bounds of the memory of issued tokens.
const (
	maxIssued     = 20_000
	maxIssuedKeys = 8     // of one sandbox
	maxIssuedOf   = 2_000 // sandboxes of one key, so that it cannot displace those of others
)

// issued remembers which keys have tokens of a sandbox. A signed link names neither its key nor its token, so its signature is
// compared with those of these keys. A token that was forgotten, or that another controller issued, is remembered again when a
// client uses it.
type issued struct {
	mu  sync.Mutex // guards the maps; the older one goes when the newer one is full
	now map[coppice.WorkspaceID][]coppice.KeyID
	old map[coppice.WorkspaceID][]coppice.KeyID
	of  map[coppice.KeyID][]coppice.WorkspaceID // in now, in the order in which they came
}

func (i *issued) add(ws coppice.WorkspaceID, key coppice.KeyID) {
	i.mu.Lock()
	defer i.mu.Unlock()
	list := i.list(ws)
	if len(list) > 0 && list[0] == key && i.now[ws] != nil {
		return
	}
	list = append([]coppice.KeyID{key}, slices.DeleteFunc(slices.Clone(list), func(k coppice.KeyID) bool { return k == key })...)
	if i.now == nil || len(i.now) >= maxIssued/2 {
		i.old, i.now = i.now, map[coppice.WorkspaceID][]coppice.KeyID{}
		i.of = map[coppice.KeyID][]coppice.WorkspaceID{}
	}
	if !slices.Contains(i.now[ws], key) {
		i.room(key)
		i.of[key] = append(i.of[key], ws)
	}
	i.now[ws] = list[:min(len(list), maxIssuedKeys)]
}

// room forgets the first sandbox of a key that has as many as it may have. mu is held.
func (i *issued) room(key coppice.KeyID) {
	if len(i.of[key]) < maxIssuedOf {
		return
	}
	first := i.of[key][0]
	i.of[key] = i.of[key][1:]
	left := slices.DeleteFunc(slices.Clone(i.now[first]), func(k coppice.KeyID) bool { return k == key })
	if i.now[first] = left; len(left) == 0 {
		delete(i.now, first)
	}
}

// The caller of list holds mu.
func (i *issued) list(ws coppice.WorkspaceID) []coppice.KeyID {
	if list := i.now[ws]; list != nil {
		return list
	}
	return i.old[ws]
}

func (i *issued) keys(ws coppice.WorkspaceID) []coppice.KeyID {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.list(ws))
}
