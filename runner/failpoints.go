package runner

import "github.com/coppice-dev/coppice/internal/failpoint"

// The steps at which a test makes a runner fail or end.
var (
	templateAfterBase = failpoint.New("template.after_base") // the base is on disk, no record names it

	shellJournaled = failpoint.New("shell.journaled") // there are directories and a journal that names nothing
	shellNamespace = failpoint.New("shell.namespace") // there is a namespace that the journal does not name
	shellCgroup    = failpoint.New("shell.cgroup")    // there are a disk and a cgroup
	shellSpawned   = failpoint.New("shell.spawned")   // there is a VMM that the journal does not name
	shellMade      = failpoint.New("shell.made")      // the journal is whole

	forkListed    = failpoint.New("fork.listed")    // the sandbox is listed, its journal does not know of it
	forkJournaled = failpoint.New("fork.journaled") // the shell will become a sandbox
	forkRestored  = failpoint.New("fork.restored")  // memory and devices are the checkpoint's
	forkAssigned  = failpoint.New("fork.assigned")  // the namespace has its identity
	forkResumed   = failpoint.New("fork.resumed")   // kernel and agent run
	forkConnected = failpoint.New("fork.connected") // the agent has answered
	forkResealed  = failpoint.New("fork.resealed")  // every step was proven
	forkServed    = failpoint.New("fork.served")    // the egress process has the sandbox, whose tap is down
	forkOpened    = failpoint.New("fork.opened")    // the tap is up
	forkReleased  = failpoint.New("fork.released")  // the workload runs, but this is not recorded
	forkReady     = failpoint.New("fork.ready")     // the journal says that it is ready, the caller does not know

	prepareWeighed   = failpoint.New("prepare.weighed")   // there is a shell, with the lowest share of the processors
	prepareRestored  = failpoint.New("prepare.restored")  // memory and devices are the checkpoint's
	prepareResumed   = failpoint.New("prepare.resumed")   // kernel and agent run
	prepareConnected = failpoint.New("prepare.connected") // the agent has answered
	prepareResealed  = failpoint.New("prepare.resealed")  // it has the identity of nobody
	prepareClaimed   = failpoint.New("prepare.claimed")   // it is the sandbox of a fork, with this identity still

	captureJournaled = failpoint.New("capture.journaled") // the capture is announced
	capturePrepared  = failpoint.New("capture.prepared")  // there is a directory for it
	captureFrozen    = failpoint.New("capture.frozen")    // the workload stands still
	capturePaused    = failpoint.New("capture.paused")    // the machine does
	captureSaved     = failpoint.New("capture.saved")     // device state is written
	captureCopied    = failpoint.New("capture.copied")    // memory is copied
	captureCloned    = failpoint.New("capture.cloned")    // the disk is cloned
	captureResumed   = failpoint.New("capture.resumed")   // kernel and agent run
	captureReseeded  = failpoint.New("capture.reseeded")  // the kernel has fresh entropy
	captureThawed    = failpoint.New("capture.thawed")    // the workload runs, nothing is durable
	captureWritten   = failpoint.New("capture.written")   // the files are durable, under another name
	capturePublished = failpoint.New("capture.published") // the checkpoint is there, the journal does not know
)
