package main

import (
	"net/http"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// vmm is the process: it has a VM, or the configuration of one, or neither.
type vmm struct {
	faults faults
	events *events
	exit   chan error // of size 1: how the process ends

	// turn is held by whatever changes the VM: a request or a guest that ends. It guards the fields below.
	turn    sync.Mutex
	calls   map[string]int
	config  *vmConfig
	console *console // made with the configuration
	vm      *vm
}

// call is a call of the API.
type call struct {
	method string
	body   bool
	failed string // what cloud-hypervisor says before the reason
	do     func(v *vmm, req request) ([]byte, error)
}

var calls = map[string]call{
	"vmm.ping":       {http.MethodGet, false, "The VMM could not be pinged", (*vmm).ping},
	"vm.create":      {http.MethodPut, true, "The VM could not be created", (*vmm).create},
	"vm.add-net":     {http.MethodPut, true, "The network device could not be added to the VM", (*vmm).addNet},
	"vm.boot":        {http.MethodPut, false, "The VM could not boot", (*vmm).boot},
	"vm.info":        {http.MethodGet, false, "The VM info is not available", (*vmm).info},
	"vm.pause":       {http.MethodPut, false, "The VM could not be paused", (*vmm).pause},
	"vm.resume":      {http.MethodPut, false, "The VM could not resume", (*vmm).resume},
	"vm.snapshot":    {http.MethodPut, true, "The VM could not be snapshotted", (*vmm).snapshot},
	"vm.restore":     {http.MethodPut, true, "The VM could not be restored", (*vmm).restore},
	"vm.resize-disk": {http.MethodPut, true, "The disk could not be resized", (*vmm).resizeDisk},
}

// bodyError is the error of a body that cannot be read.
type bodyError struct{ chain }

func (v *vmm) handle(req request) response {
	c, ok := calls[req.name]
	switch {
	case !ok:
		return jsonError(http.StatusNotFound, chain{"Not Found"})
	case req.method != c.method || c.body != (req.body != nil):
		return jsonError(http.StatusBadRequest, chain{"Bad Request"})
	}
	v.calls[req.name]++
	fault := v.faults.of(req.name, v.calls[req.name])
	switch fault {
	case "hang":
		select {}
	case "die":
		os.Exit(137) // the first process of its namespace cannot kill itself
	case "500":
		return jsonError(http.StatusInternalServerError, chain{"Error from API", c.failed, "fakech: it was told to fail"})
	}
	body, err := c.do(v, req)
	r := response{status: http.StatusOK, body: body}
	switch err := err.(type) { //nolint:errorlint // these are never wrapped
	case nil:
		if body == nil {
			r.status = http.StatusNoContent
		}
	case bodyError:
		r = jsonError(http.StatusBadRequest, err.chain)
	default:
		words := asChain(err)
		r = jsonError(status(words), wrap("Error from API", wrap(c.failed, words)))
	}
	r.fault = fault
	return r
}

func (v *vmm) ping(request) ([]byte, error) {
	return encode(map[string]any{"version": v.faults.version() + ".0", "pid": os.Getpid()}), nil
}

func (v *vmm) create(req request) ([]byte, error) {
	config, err := parseConfig(req.body)
	if err != nil {
		return nil, bodyError{wrap("Failed to deserialize JSON", err)}
	}
	if len(config.Net) > 0 {
		return nil, chain{"fakech: descriptors come with vm.add-net only"}
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
	v.events.emit("vm", "booting")
	if v.config == nil {
		return nil, errMissingConfig
	}
	vm, err := v.newVM(v.config)
	if err != nil {
		return nil, err
	}
	v.vm = vm // also if it cannot boot
	if err := vm.boot(); err != nil {
		return nil, err
	}
	v.events.emit("vm", "booted")
	return nil, nil
}

// guestEnds is called when the guest has powered off or was reset. cloud-hypervisor boots it again after a reset, which
// the driver must not let happen: here, it stands still until the driver has ended it.
func (v *vmm) guestEnds(reset bool) {
	v.turn.Lock()
	defer v.turn.Unlock()
	if reset {
		v.vm.cpu.Run(false)
		v.events.emit("vm", "rebooting")
		return
	}
	v.vm.close()
	v.events.emit("vmm", "shutdown")
	v.exit <- nil
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

func (v *vmm) info(request) ([]byte, error) {
	if v.config == nil {
		return nil, errNotCreated
	}
	state := stateCreated
	if v.vm != nil {
		state = v.vm.state
	}
	return encode(map[string]any{"config": v.config, "state": state}), nil
}

func (v *vmm) resizeDisk(req request) ([]byte, error) {
	var to struct {
		ID   string `json:"id"`
		Size uint64 `json:"desired_size"`
	}
	if err := decode(req.body, &to); err != nil {
		return nil, bodyError{wrap("Failed to deserialize JSON", err)}
	}
	if v.vm == nil {
		return nil, errNotCreated
	}
	for _, d := range v.vm.disks {
		if d.id == to.ID {
			return nil, d.resize(to.Size)
		}
	}
	return nil, chain{"Error from device manager", "Failed to find device corresponding to the given identifier: " + to.ID}
}

func (v *vmm) addNet(req request) ([]byte, error) {
	var config netConfig
	if err := decode(req.body, &config); err != nil {
		return nil, bodyError{wrap("Failed to deserialize JSON", err)}
	}
	if v.config == nil || v.vm != nil {
		return nil, errNotCreated
	}
	var err error
	if config.FDs, err = keep(req.files); err != nil {
		return nil, err
	}
	with := *v.config
	with.Net = append(with.Net, config)
	if err := with.validate(); err != nil {
		return nil, wrap("Failed to validate config", err)
	}
	v.config.Net = with.Net
	return nil, nil
}

// keep copies descriptors that came with a request.
func keep(fds []int) ([]int, error) {
	var out []int
	for _, fd := range fds {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, err
		}
		out = append(out, own)
	}
	return out, nil
}
