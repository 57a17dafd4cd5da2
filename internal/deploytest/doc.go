// Package deploytest checks what is in deploy/ with the real thing's own parsers, as far as that goes without an engine, a cluster or a service
// manager: docker-compose.yml with Compose's, the Dockerfile with BuildKit's, the chart with Helm's engine and Kubernetes' types, the
// units with systemd-analyze. Whatever flag or variable they give coppice must be one that it reads. It is a module of its own, so that
// none of these is a dependency of the program.
package deploytest
