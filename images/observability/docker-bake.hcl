// The images of compose/observability.yaml where no registry has them. A file of its own: a change here leaves the tags
// (content hashes) of vLLM's image alone. `kvstrata up` fills in the variables; by hand:
//   BASE_IMAGE=python:3.11-slim-bookworm docker buildx bake -f images/observability/docker-bake.hcl
variable "BASE_IMAGE" { default = "python:3.11-slim-bookworm" }
variable "OTELCOL_TAG" { default = "kvstrata/otelcol:dev" }
variable "MONITOR_TAG" { default = "kvstrata/monitor:dev" }
variable "TRACES_TAG" { default = "kvstrata/traces:dev" }
variable "CA_BUNDLE" { default = "" }
variable "PIP_CONF" { default = "" }
variable "HTTP_PROXY" { default = "" }
variable "HTTPS_PROXY" { default = "" }
variable "NO_PROXY" { default = "" }
// Where Go's modules come from; empty = Go's own default. Their hashes stand in go.sum.
variable "GOPROXY" { default = "" }

group "default" { targets = ["otelcol", "monitor", "traces"] }

target "_common" {
  context    = "."
  dockerfile = "images/observability/Dockerfile"
  attest     = ["type=provenance,disabled=true"]
  args = {
    BASE_IMAGE  = BASE_IMAGE
    GOPROXY     = GOPROXY
    HTTP_PROXY  = HTTP_PROXY
    HTTPS_PROXY = HTTPS_PROXY
    NO_PROXY    = NO_PROXY
  }
  secret = concat(
    CA_BUNDLE != "" ? ["id=ca_bundle,src=${CA_BUNDLE}"] : [],
    PIP_CONF != "" ? ["id=pip_conf,src=${PIP_CONF}"] : [],
  )
  output = ["type=docker"]
}

target "otelcol" {
  inherits = ["_common"]
  target   = "otelcol"
  tags     = [OTELCOL_TAG]
}

target "monitor" {
  inherits = ["_common"]
  target   = "monitor"
  tags     = [MONITOR_TAG]
}

target "traces" {
  inherits = ["_common"]
  target   = "traces"
  tags     = [TRACES_TAG]
}
