//go:build linux

package guestagent

import (
	"net/http"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/loopback"
	"github.com/coppice-dev/coppice/guestagent/mark"
	"github.com/coppice-dev/coppice/guestagent/procfs"
)

func (a *Agent) routes() http.Handler {
	mux := http.NewServeMux()
	control := func(pattern string, h answer.Handler) { mux.Handle(pattern, h) }
	public := func(pattern string, h answer.Handler) {
		mux.Handle(pattern, answer.Handler(func(w http.ResponseWriter, r *http.Request) error {
			a.idle.begin()
			defer a.idle.end()
			if err := a.gate.pass(r.Context()); err != nil {
				return err
			}
			return h(w, r)
		}))
	}
	control("GET "+guestapi.PathHealth, a.health)
	control("POST "+guestapi.PathQuiesce, a.quiesce)
	control("POST "+guestapi.PathReseed, a.reseed)
	control("POST "+guestapi.PathReseal, a.resealGuest)
	control("POST "+guestapi.PathRelease, a.release)
	control("POST "+guestapi.PathFlush, a.flushDisk)

	a.sessions.Routes(public)
	for _, path := range []string{guestapi.PathFiles, guestapi.PathFileContent} {
		public("GET "+path, a.files.Get)
		public("PUT "+path, a.files.Put)
		public("DELETE "+path, a.files.Delete)
	}
	public("POST "+guestapi.PathMakeDir, a.files.MakeDir)
	public("POST "+guestapi.PathRename, a.files.Rename)
	public("POST "+guestapi.PathXAttrs, a.files.SetXAttrs)
	public("POST "+guestapi.PathWatches, a.createWatch)
	public("GET "+guestapi.PathWatches, a.listWatches)
	public("DELETE "+guestapi.PathWatch, a.deleteWatch)
	public("GET "+guestapi.PathWatchEvents, a.watchEvents)
	public("GET "+guestapi.PathProcesses, a.getProcesses)
	public("GET "+guestapi.PathPorts, a.getPorts)
	public("GET "+guestapi.PathMark, a.getMark)
	public("GET "+guestapi.PathPortConnect, loopback.Connect)
	control("/", func(http.ResponseWriter, *http.Request) error {
		return core.Errorf(core.NotFound, core.CodeRouteNotFound, "the agent has no such route")
	})
	return mux
}

func (a *Agent) getProcesses(w http.ResponseWriter, _ *http.Request) error {
	list, err := procfs.Processes(a.work.Proc())
	if err != nil {
		return err
	}
	answer.WriteJSON(w, http.StatusOK, list)
	return nil
}

// getMark flushes the disk first, so that what was written is counted.
func (a *Agent) getMark(w http.ResponseWriter, _ *http.Request) error {
	var out guestapi.Mark
	if a.disk.flush(maxFlush) {
		var err error
		proc := a.work.Proc()
		guest := mark.Guest{Disk: a.disk.path, Root: strings.TrimSuffix(proc, "/proc"), Proc: proc, PIDs: a.work.PIDs}
		if out.Mark, err = guest.Make(); err != nil {
			return err
		}
	}
	answer.WriteJSON(w, http.StatusOK, out)
	return nil
}

func (a *Agent) getPorts(w http.ResponseWriter, _ *http.Request) error {
	list, err := procfs.Ports(a.work.Proc())
	if err != nil {
		return err
	}
	answer.WriteJSON(w, http.StatusOK, list)
	return nil
}
