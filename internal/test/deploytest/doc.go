// Package deploytest checks the files in deploy/ with the original parsers, as far as that works
// without an engine, a cluster or a service manager: docker-compose.yml with Compose's, the
// Dockerfile with BuildKit's, the chart with Helm's engine and Kubernetes' types, the units with
// systemd-analyze. Every flag or variable that they give to coppice must be one that it reads. The
// package is a separate module, so that the program does not depend on any of these.
package deploytest
