package main

import (
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// vmm is the process: it has a VM, or the configuration of one, or neither.
type vmm struct {
	faults faults
	events *events
	log    *logger
	stay   bool       // when the guest powers off
	exit   chan error // of one: how the process ends

	// turn is held by whatever changes the VM: a request, the guest that powers off, a signal. It guards what follows.
	turn    sync.Mutex
	over    bool
	calls   map[string]int
	config  *vmConfig
	console *console // made with the configuration; nil once it was used
	vm      *vm
}

// call is a route. Those with neither do take no body.
type call struct {
	get  bool
	what string // could not be done
	do   func(v *vmm, req request) ([]byte, error)
	body bool
	// ping and info have handlers of their own, which answer otherwise in small things.
	ownBody bool // a body is looked at by nobody
	ok      int
}

var calls = map[string]call{
	"vmm.ping":     {get: true, do: (*vmm).ping, ownBody: true},
	"vmm.shutdown": {what: "The VMM could not shutdown", do: (*vmm).stop, ownBody: true, ok: 200},
	"vm.create":    {what: "The VM could not be created", do: (*vmm).create, body: true},
	"vm.boot":      {what: "The VM could not boot", do: (*vmm).boot},
	"vm.info":      {get: true, what: "The VM info is not available", do: (*vmm).info, ownBody: true},
	"vm.counters":  {get: true, what: "The VM info is not available", do: (*vmm).counters, ownBody: true},
	"vm.pause":     {what: "The VM could not be paused", do: (*vmm).pause},
	"vm.resume":    {what: "The VM could not resume", do: (*vmm).resume},
	"vm.reboot":    {what: "The VM could not reboot", do: (*vmm).rebootCall},
	"vm.shutdown":  {what: "The VM could not shutdown", do: (*vmm).shutdownVM},
	"vm.delete":    {what: "The VM could not be deleted", do: (*vmm).deleteVM},
	"vm.snapshot":  {what: "The VM could not be snapshotted", do: (*vmm).snapshot, body: true},
	"vm.restore":   {what: "The VM could not be restored", do: (*vmm).restore, body: true},
	"vm.add-net":   {what: "The network device could not be added to the VM", do: (*vmm).addNet, body: true},
	"vm.resize-disk": {
		what: "The disk could not be resized", do: (*vmm).resizeDisk, body: true,
	},
}

// bodyError is an error of a request's body.
type bodyError struct{ chain }

// requestError is answered without a word about what was bad.
type requestError struct{ error }

var errBadRequest = requestError{chain{"Bad Request"}}

func (v *vmm) handle(req request) response {
	name := strings.TrimPrefix(req.path, apiRoot)
	c, ok := calls[name]
	switch {
	case !ok || name == req.path:
		return jsonError(404, chain{"Not Found"})
	case req.method == "PATCH" && !c.ownBody && name != "vm.create":
		return response{status: 400}
	case (req.method == "GET") != c.get || req.method == "PATCH":
		return jsonError(400, chain{"Bad Request"})
	case c.body && req.body == nil && name == "vm.create":
		return response{status: 400}
	case c.body != (req.body != nil) && !c.ownBody:
		return jsonError(400, chain{"Bad Request"})
	}
	if v.calls == nil {
		v.calls = make(map[string]int)
	}
	v.calls[name]++
	fault := v.faults.of(name, v.calls[name])
	switch fault {
	case "hang":
		select {}
	case "die":
		os.Exit(137) // the first process of its namespace cannot kill itself
	case "500":
		return jsonError(500, chain{"Error from API", c.what, "fakech: it was told to fail"})
	}
	body, err := c.do(v, req)
	var r response
	switch err := err.(type) { //nolint:errorlint // these are never wrapped
	case nil:
		r = response{status: c.ok, body: body}
		if r.status == 0 && body != nil {
			r.status = 200
		} else if r.status == 0 {
			r.status = 204
		}
	case requestError:
		r = jsonError(400, asChain(err.error))
	case bodyError:
		r = jsonError(400, wrap("Failed to deserialize JSON", err.chain))
	default:
		words := asChain(err)
		v.log.at(1, "HTTP API error response: Error from API: %s: %s", c.what, words)
		r = jsonError(status(words), wrap("Error from API", wrap(c.what, words)))
	}
	if r.body == nil {
		r.body = []byte{}
	}
	r.fault = fault
	return r
}

func (v *vmm) ping(request) ([]byte, error) {
	n := v.faults.version()
	return encode(struct {
		Build    string   `json:"build_version"`
		Version  string   `json:"version"`
		PID      int      `json:"pid"`
		Features []string `json:"features"`
	}{"v" + n, n + ".0", os.Getpid(), []string{"io_uring", "kvm"}}), nil
}

// stop is the call vmm.shutdown.
func (v *vmm) stop(request) ([]byte, error) {
	err := v.shutdown()
	if err == nil {
		v.end(nil)
	}
	return nil, err
}

// end ends the process, once what is being answered is.
func (v *vmm) end(err error) {
	if v.over {
		return
	}
	v.over = true
	v.exit <- err
}

// shutdown ends the VM for good.
func (v *vmm) shutdown() error {
	if err := v.delete(); err != nil {
		return wrap("Error shutting down VMM", err)
	}
	v.events.emit("vmm", "shutdown", nil)
	return nil
}

func (v *vmm) deleteVM(request) ([]byte, error) { return nil, v.delete() }

func (v *vmm) delete() error {
	if v.config == nil {
		return nil
	}
	if v.vm != nil {
		if _, err := v.shutdownVM(request{}); err != nil {
			return err
		}
	}
	v.config = nil
	v.events.emit("vm", "deleted", nil)
	return nil
}

func (v *vmm) shutdownVM(request) ([]byte, error) {
	if v.vm == nil {
		return nil, errNotRunning
	}
	v.console = nil
	vm := v.vm
	v.vm = nil
	vm.close()
	v.events.emit("vm", "shutdown", nil)
	return nil, nil
}

func (v *vmm) create(req request) ([]byte, error) {
	config, err := parseConfig(req.body)
	if err != nil {
		return nil, bodyError{asChain(err)}
	}
	for i := range config.Net {
		config.Net[i].FDs = nil // they come with vm.add-net only
	}
	if v.config != nil {
		return nil, errAlreadyCreated
	}
	v.config = config
	if v.console, err = newConsole(config); err != nil {
		return nil, err
	}
	return nil, config.landlock()
}

func (v *vmm) boot(request) ([]byte, error) {
	if v.vm != nil {
		return nil, errAlreadyCreated
	}
	v.events.emit("vm", "booting", nil)
	if err := v.start(); err != nil {
		return nil, err
	}
	v.events.emit("vm", "booted", nil)
	v.vm.activated() // by the guest's drivers
	return nil, nil
}

// start makes the VM of the configuration and boots it.
func (v *vmm) start() error {
	if v.config == nil {
		return errMissingConfig
	}
	if v.console == nil {
		var err error
		if v.console, err = newConsole(v.config); err != nil {
			return err
		}
	}
	vm, err := v.newVM(v.config, nil, "")
	if err != nil {
		return err
	}
	v.vm = vm // also of one that cannot boot
	return vm.boot()
}

func (v *vmm) rebootCall(request) ([]byte, error) { return nil, v.reboot() }

// reboot makes the VM again from its configuration.
func (v *vmm) reboot() error {
	v.events.emit("vm", "rebooting", nil)
	if v.vm == nil {
		return errNotCreated
	}
	v.vm.close()
	v.vm, v.console = nil, nil
	if err := v.start(); err != nil {
		if v.vm != nil {
			v.vm.close()
		}
		return err
	}
	v.events.emit("vm", "rebooted", nil)
	return nil
}

// guestEnds is called when the guest has powered off, or was reset.
func (v *vmm) guestEnds(of *vm, reset bool) {
	v.turn.Lock()
	defer v.turn.Unlock()
	if v.vm != of || v.over {
		return
	}
	switch {
	case reset:
		if err := v.reboot(); err != nil {
			v.end(wrap("VMM thread exited with error", wrap("Error rebooting VM", err)))
		}
	case v.stay:
		_, _ = v.shutdownVM(request{})
	default:
		v.end(v.shutdown())
	}
}

func (v *vmm) pause(request) ([]byte, error) {
	if v.vm == nil {
		return nil, errNotRunning
	}
	if err := v.vm.pause(); err != nil {
		return nil, wrap("Cannot pause VM", wrap("Failed to pause migratable component", err))
	}
	return nil, nil
}

func (v *vmm) resume(request) ([]byte, error) {
	if v.vm == nil {
		return nil, errNotRunning
	}
	if err := v.vm.resume(); err != nil {
		return nil, wrap("Cannot resume VM", wrap("Failed to resume migratable component", err))
	}
	return nil, nil
}

func (v *vmm) snapshot(req request) ([]byte, error) {
	var to struct {
		URL string `json:"destination_url" need:"yes"`
	}
	if err := decode(req.body, &to); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if v.vm == nil {
		return nil, errNotRunning
	}
	v.console = nil
	state, err := v.vm.snapshot()
	if err != nil {
		return nil, wrap("Cannot snapshot VM", err)
	}
	if err := v.vm.send(to.URL, state); err != nil {
		return nil, wrap("Cannot send VM snapshot", err)
	}
	return nil, nil
}

func (v *vmm) info(request) ([]byte, error) {
	if v.config == nil {
		return nil, errNotCreated
	}
	out := struct {
		Config *vmConfig             `json:"config"`
		State  vmState               `json:"state"`
		Memory uint64                `json:"memory_actual_size"`
		Tree   map[string]deviceNode `json:"device_tree,omitempty"`
	}{Config: v.config, State: stateCreated, Memory: v.config.Memory.total()}
	if v.vm != nil {
		out.State, out.Tree = v.vm.state, v.vm.tree
	}
	return encode(out), nil
}

func (v *vmm) counters(request) ([]byte, error) {
	if v.vm == nil {
		return nil, errNotRunning
	}
	return encode(v.vm.counters()), nil
}

func (v *vmm) resizeDisk(req request) ([]byte, error) {
	var to struct {
		ID   string `json:"id" need:"yes"`
		Size uint64 `json:"desired_size" need:"yes"`
	}
	if err := decode(req.body, &to); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if v.config == nil {
		return nil, errNotCreated
	}
	if v.vm == nil {
		return nil, chain{"Failed resizing a disk image"}
	}
	if err := v.vm.resizeDisk(to.ID, to.Size); err != nil {
		return nil, wrap("Error from device manager", err)
	}
	return nil, nil
}

func (v *vmm) addNet(req request) ([]byte, error) {
	var config netConfig
	if err := decode(req.body, &config); err != nil {
		return nil, bodyError{asChain(err)}
	}
	config.FDs = nil
	if len(req.files) > 0 {
		fds, err := keep(req.files)
		if err != nil {
			return nil, err
		}
		config.FDs = fds
	}
	if v.config == nil {
		return nil, errNotCreated
	}
	with := *v.config
	with.Net = append(append([]netConfig(nil), v.config.Net...), config)
	if err := with.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	if v.vm == nil {
		v.config.Net = with.Net
		return nil, nil
	}
	info, err := v.vm.addNet(&config)
	if err != nil {
		return nil, wrap("Error from device manager", err)
	}
	v.config.Net = append(v.config.Net, config)
	return encode(info), nil
}

// keep copies descriptors that came with a request.
func keep(fds []int) ([]int, error) {
	out := make([]int, 0, len(fds))
	for _, fd := range fds {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, err
		}
		out = append(out, own)
	}
	return out, nil
}
