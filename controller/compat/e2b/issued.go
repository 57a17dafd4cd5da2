package e2b

import (
	"slices"
	"sync"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The bounds of what is remembered of issued tokens.
const (
	maxIssued     = 20_000
	maxIssuedKeys = 8 // of one sandbox
)

// issued remembers which keys have tokens of a sandbox. A signed link names neither its key nor its token, so its signature is
// compared with those of these keys. What is forgotten, or was issued by another controller, is remembered again when a client
// uses the token.
type issued struct {
	mu  sync.Mutex // guards the maps; the older one goes when the newer one is full
	now map[coppice.WorkspaceID][]coppice.KeyID
	old map[coppice.WorkspaceID][]coppice.KeyID
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
	}
	i.now[ws] = list[:min(len(list), maxIssuedKeys)]
}

// list needs mu.
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
