package template

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const (
	maxEntries = 100  // of a log in one answer, as E2B has it
	maxPlaces  = 4096 // logs whose places are remembered
)

// The states of a build.
const (
	waiting  = "waiting"
	building = "building"
	ready    = "ready"
	failed   = "error"
)

// Reason is why a build failed.
type Reason struct {
	Message string `json:"message"`
}

// Entry is a line of a log.
type Entry struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"`
	Message   string    `json:"message"`
}

// Status is how far a build is.
type Status struct {
	TemplateID string   `json:"templateID"`
	BuildID    string   `json:"buildID"`
	Status     string   `json:"status"`
	Reason     *Reason  `json:"reason,omitempty"`
	Logs       []string `json:"logs"`
	LogEntries []Entry  `json:"logEntries"`
}

// StatusOf says how far a build is. offset counts the entries of the log that the client has.
func StatusOf(ctx context.Context, client *coppice.Client, places *Places, template, build string, offset int) (Status, error) {
	out := Status{TemplateID: template, BuildID: build, Status: building, Logs: []string{}, LogEntries: []Entry{}}
	op, err := operationOf(ctx, client, template, build)
	if err != nil {
		return out, err
	}
	switch op.State {
	case coppice.OperationPending:
		out.Status = waiting
	case coppice.OperationRunning:
	case coppice.OperationSucceeded:
		out.Status = ready
	default:
		out.Status, out.Reason = failed, &Reason{Message: "the build ended with the state " + string(op.State)}
		if op.Problem != nil {
			out.Reason.Message = op.Problem.Message + " (" + op.Problem.Code + ")"
		}
	}
	out.LogEntries, err = places.entries(ctx, client, op.ID, offset, out.Status == ready || out.Status == failed)
	return out, err
}

// operationOf finds the operation of a build: by its idempotency key, or if the key is no longer kept, by the image that the build has made.
func operationOf(ctx context.Context, client *coppice.Client, template, build string) (coppice.Operation, error) {
	if _, _, err := sizeOf(build); err != nil {
		return coppice.Operation{}, err
	}
	kinds := []coppice.OperationKind{coppice.OperationBuildImage}
	for op, err := range client.Operations(ctx, coppice.OperationFilter{Kinds: kinds, IdempotencyKey: claim(template, build)}) {
		return op, err
	}
	absent := shared.Failf(http.StatusNotFound, "build %q of template %q was not found", shared.Clip(build), shared.Clip(template))
	image, err := client.BuiltImage(ctx, ImageName(template))
	if errors.Is(err, coppice.CodeImageNotFound) || err == nil && image.Labels[labelBuild] != build {
		return coppice.Operation{}, absent
	}
	if err != nil {
		return coppice.Operation{}, err
	}
	op, err := client.Operation(ctx, image.Build.OperationID)
	if gone(err) {
		return coppice.Operation{ID: image.Build.OperationID, State: coppice.OperationSucceeded}, nil
	}
	return op, err
}

func gone(err error) bool { return errors.Is(err, coppice.CodeOperationNotFound) }

// Places remembers how far logs were read, so that a client that polls does not make the server read all of a log each time. If a place is
// forgotten, or another controller serves the client, the log is read from its start.
type Places struct {
	mu       sync.Mutex // guards the maps; the older one goes when the newer one is full
	now, old map[coppice.OperationID]place
}

// place is the end of a line of a log: its number, and the offset in bytes.
type place struct {
	line int
	at   int64
}

func (p *Places) of(id coppice.OperationID) place {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at, ok := p.now[id]; ok {
		return at
	}
	return p.old[id]
}

func (p *Places) put(id coppice.OperationID, at place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.now[id]; p.now == nil || !known && len(p.now) >= maxPlaces/2 {
		p.old, p.now = p.now, map[coppice.OperationID]place{}
	}
	p.now[id] = at
}

// entries reads entries, one for each line, from an offset that counts entries. While the build goes on, a line that has no end yet is left
// for later.
func (p *Places) entries(ctx context.Context, client *coppice.Client, id coppice.OperationID, offset int, ended bool) ([]Entry, error) {
	at := p.of(id)
	if offset < at.line {
		at = place{}
	}
	out, now := []Entry{}, time.Now().UTC()
	var rest []byte
	for next := at.at; len(out) < maxEntries; {
		part, after, err := client.OperationLog(ctx, id, next)
		if gone(err) { // it is too long ago
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		next, rest = after, append(rest, part...)
		last := len(part) == 0
		for len(out) < maxEntries && len(rest) > 0 {
			line, more, whole := bytes.Cut(rest, []byte{'\n'})
			if !whole && (!last || !ended) {
				break
			}
			if at.line >= offset {
				out = append(out, Entry{now, "info", strings.TrimSuffix(strings.ToValidUTF8(string(line), "\uFFFD"), "\r")})
			}
			at = place{at.line + 1, at.at + int64(len(rest)-len(more))}
			rest = more
		}
		if last {
			break
		}
	}
	p.put(id, at)
	return out, nil
}

// Listed is a template in a list.
type Listed struct {
	TemplateID    string    `json:"templateID"`
	BuildID       string    `json:"buildID"`
	CPUCount      int       `json:"cpuCount"`
	MemoryMB      int       `json:"memoryMB"`
	DiskSizeMB    int       `json:"diskSizeMB"`
	Public        bool      `json:"public"`
	Aliases       []string  `json:"aliases"`
	Names         []string  `json:"names"`
	CreatedAt     time.Time `json:"createdAt"`
	UpdatedAt     time.Time `json:"updatedAt"`
	CreatedBy     *struct{} `json:"createdBy"`
	LastSpawnedAt *struct{} `json:"lastSpawnedAt"`
	SpawnCount    int       `json:"spawnCount"`
	BuildCount    int       `json:"buildCount"`
	EnvdVersion   string    `json:"envdVersion"`
	BuildStatus   string    `json:"buildStatus"`
}

// List lists the images of the project as templates. The size of an image that was built in another way is zero.
func List(ctx context.Context, client *coppice.Client, envd string) ([]Listed, error) {
	images, err := client.BuiltImages(ctx)
	if err != nil {
		return nil, err
	}
	out := []Listed{}
	for _, image := range images {
		t := Listed{
			TemplateID: image.Name, BuildID: image.Labels[labelBuild], CreatedAt: image.CreatedAt, UpdatedAt: image.CreatedAt, BuildCount: 1,
			EnvdVersion: envd, BuildStatus: ready,
		}
		if name := image.Labels[LabelName]; name != "" {
			t.TemplateID = name
		}
		if t.CPUCount, t.MemoryMB, err = sizeOf(t.BuildID); err != nil {
			t.BuildID = uuid.Nil.String()
		}
		t.Aliases, t.Names = []string{t.TemplateID}, []string{t.TemplateID}
		out = append(out, t)
	}
	return out, nil
}
