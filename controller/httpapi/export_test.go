package httpapi

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/controller"
)

// NewWithPace is New with streams that hurry.
func NewWithPace(control *controller.Controller, log *slog.Logger, heartbeat, write time.Duration) http.Handler {
	s := newServer(control, log)
	s.pace = pace{heartbeat: heartbeat, write: write}
	return s.handler(bodyTime)
}

// NewWithUploads is New with another bound of uploads than the usual one, which is returned.
func NewWithUploads(control *controller.Controller, log *slog.Logger, most int64) (http.Handler, int64) {
	s := newServer(control, log)
	usual := s.upload
	s.upload = most
	return s.handler(bodyTime), usual
}
