package main

import (
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// vmm is the process: it has a VM, or the configuration of one, or neither.
type vmm struct {
	faults faults
	events *events
	exit   chan error // of one: how the process ends

	// turn is held by whatever changes the VM: a request, or the guest that powers off. It guards what follows.
	turn   sync.Mutex
	over   bool
	calls  map[string]int
	config *vmConfig
	vm     *vm
}

// serve is the VMM's life.
func serve(f faults, api, monitor int) error {
	ev, err := openEvents(monitor, f)
	if err != nil {
		return err
	}
	l, err := listenerOf(api)
	if err != nil {
		return err
	}
	ev.emit("vmm", "starting")
	v := &vmm{faults: f, events: ev, exit: make(chan error, 1), calls: map[string]int{}}
	go v.serveAPI(l)
	return <-v.exit
}

// call is a route.
type call struct {
	method string
	what   string // could not be done
	do     func(v *vmm, req request) ([]byte, error)
	body   bool // it has one
	files  bool // it takes what comes with the request
}

var calls = map[string]call{
	"vmm.ping":       {method: "GET", do: (*vmm).ping},
	"vm.info":        {method: "GET", what: "The VM info is not available", do: (*vmm).info},
	"vm.create":      {method: "PUT", what: "The VM could not be created", do: (*vmm).create, body: true},
	"vm.add-net":     {method: "PUT", what: "The network device could not be added to the VM", do: (*vmm).addNet, body: true, files: true},
	"vm.boot":        {method: "PUT", what: "The VM could not boot", do: (*vmm).boot},
	"vm.pause":       {method: "PUT", what: "The VM could not be paused", do: (*vmm).pause},
	"vm.resume":      {method: "PUT", what: "The VM could not resume", do: (*vmm).resume},
	"vm.snapshot":    {method: "PUT", what: "The VM could not be snapshotted", do: (*vmm).snapshot, body: true},
	"vm.restore":     {method: "PUT", what: "The VM could not be restored", do: (*vmm).restore, body: true, files: true},
	"vm.resize-disk": {method: "PUT", what: "The disk could not be resized", do: (*vmm).resizeDisk, body: true},
}

// bodyError is an error of a request's body.
type bodyError struct{ chain }

// handle carries out a request. It is called in the turn of the vmm.
func (v *vmm) handle(req request) (r response) {
	name := strings.TrimPrefix(req.path, apiRoot)
	c, ok := calls[name]
	taken := false
	defer func() {
		for _, fd := range req.files {
			if !taken {
				_ = unix.Close(fd)
			}
		}
	}()
	switch {
	case !ok || name == req.path:
		return jsonError(404, chain{"Not Found"})
	case req.method != c.method || c.body != (req.body != nil):
		return jsonError(400, chain{"Bad Request"})
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
	switch err := err.(type) { //nolint:errorlint // these are never wrapped
	case nil:
		taken = c.files
		if r = (response{status: 204}); body != nil {
			r = response{status: 200, body: body}
		}
	case bodyError:
		r = jsonError(400, wrap("Failed to deserialize JSON", err.chain))
	default:
		words := asChain(err)
		r = jsonError(status(words), wrap("Error from API", wrap(c.what, words)))
	}
	r.fault = fault
	return r
}

// end ends the process. It is called in the turn.
func (v *vmm) end(err error) {
	if v.over {
		return
	}
	v.over = true
	v.exit <- err
}

func (v *vmm) ping(request) ([]byte, error) {
	n := v.faults.version()
	return encode(map[string]any{"build_version": "v" + n, "version": n + ".0", "pid": os.Getpid(), "features": []string{"io_uring", "kvm"}}), nil
}

func (v *vmm) info(request) ([]byte, error) {
	if v.config == nil {
		return nil, errNotCreated
	}
	state := stateCreated
	if v.vm != nil {
		state = v.vm.state
	}
	return encode(map[string]any{"config": v.config, "state": state, "memory_actual_size": v.config.ram()}), nil
}

func (v *vmm) create(req request) ([]byte, error) {
	config := new(vmConfig)
	if err := decode(req.body, config); err != nil {
		return nil, bodyError{asChain(err)}
	}
	if v.config != nil {
		return nil, errAlreadyCreated
	}
	for i := range config.Net {
		config.Net[i].FDs = nil // they come with vm.add-net only
	}
	v.config = config
	return nil, config.landlock()
}

func (v *vmm) addNet(req request) ([]byte, error) {
	var config netConfig
	if err := decode(req.body, &config); err != nil {
		return nil, bodyError{asChain(err)}
	}
	switch {
	case v.config == nil:
		return nil, errNotCreated
	case v.vm != nil:
		return nil, chain{"fakech: it adds no device to a VM that was booted"}
	}
	config.FDs = req.files
	with := *v.config
	with.Net = append(slices.Clip(with.Net), config)
	if err := with.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	v.config.Net = with.Net
	return nil, nil
}

func (v *vmm) boot(request) ([]byte, error) {
	if v.vm != nil {
		return nil, errAlreadyCreated
	}
	v.events.emit("vm", "booting")
	if err := v.start(); err != nil {
		return nil, err
	}
	v.events.emit("vm", "booted")
	return nil, nil
}

// start makes the VM of the configuration and boots it.
func (v *vmm) start() error {
	if v.config == nil {
		return errMissingConfig
	}
	vm, err := v.newVM(v.config, nil, "")
	if err != nil {
		return err
	}
	v.vm = vm // also of one that cannot boot
	return vm.boot()
}

// guestEnds is called when the guest has powered off, which ends the process, or was reset, which makes the VM anew.
func (v *vmm) guestEnds(of *vm, reset bool) {
	v.turn.Lock()
	defer v.turn.Unlock()
	if v.vm != of || v.over {
		return
	}
	if reset {
		v.events.emit("vm", "rebooting")
	}
	of.close()
	v.vm = nil
	if !reset {
		v.events.emit("vm", "shutdown")
		v.events.emit("vm", "deleted")
		v.events.emit("vmm", "shutdown")
		v.end(nil)
		return
	}
	if err := v.start(); err != nil {
		v.end(wrap("VMM thread exited with error", wrap("Error rebooting VM", err)))
		return
	}
	v.events.emit("vm", "rebooted")
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

func (v *vmm) resizeDisk(req request) ([]byte, error) {
	var to struct {
		ID   string `json:"id"`
		Size int64  `json:"desired_size"`
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
	for _, d := range v.vm.disks {
		if d.id != to.ID {
			continue
		}
		if err := d.resize(to.Size); err != nil {
			return nil, wrap("Error from device manager", wrap("Disk resize error", err))
		}
		return nil, nil
	}
	return nil, chain{"Error from device manager", "Failed to find device corresponding to the given identifier: " + to.ID}
}
