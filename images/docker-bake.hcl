// The only way in which images are built. `kvstrata build` fills in the variables; by hand:
//   BASE_IMAGE=python:3.11-slim-bookworm docker buildx bake -f images/docker-bake.hcl
variable "BASE_IMAGE" { default = "python:3.11-slim-bookworm" }
variable "DEVICE" { default = "cpu" }
variable "TORCH_INDEX_URL" { default = "" }
variable "TORCH_VERSION" { default = "2.13.0" }
variable "VLLM_TAG" { default = "kvstrata/vllm:dev" }
variable "PROXY_TAG" { default = "kvstrata/proxy:dev" }
variable "ENGINE_TAG" { default = "kvstrata/engine:dev" }
// Files for the length of the build; empty = not needed.
variable "CA_BUNDLE" { default = "" }
variable "PIP_CONF" { default = "" }
// The caller's proxy, for the RUN steps alone: build arguments of these names never enter an image.
variable "HTTP_PROXY" { default = "" }
variable "HTTPS_PROXY" { default = "" }
variable "NO_PROXY" { default = "" }

group "default" { targets = ["vllm", "proxy", "engine"] }

target "_common" {
  context = "."
  // Without attestations an image is one manifest, whose digest does not change with the time of the build.
  attest  = ["type=provenance,disabled=true"]
  args = {
    HTTP_PROXY  = HTTP_PROXY
    HTTPS_PROXY = HTTPS_PROXY
    NO_PROXY    = NO_PROXY
  }
}

target "vllm" {
  inherits   = ["_common"]
  dockerfile = "images/vllm/Dockerfile"
  args = {
    BASE_IMAGE      = BASE_IMAGE
    DEVICE          = DEVICE
    TORCH_INDEX_URL = TORCH_INDEX_URL
    TORCH_VERSION   = TORCH_VERSION
  }
  secret = concat(
    CA_BUNDLE != "" ? ["id=ca_bundle,src=${CA_BUNDLE}"] : [],
    PIP_CONF != "" ? ["id=pip_conf,src=${PIP_CONF}"] : [],
  )
  tags   = [VLLM_TAG]
  output = ["type=docker"]
}

target "proxy" {
  inherits   = ["_common"]
  dockerfile = "images/proxy/Dockerfile"
  args       = { BASE_IMAGE = BASE_IMAGE }
  tags       = [PROXY_TAG]
  output     = ["type=docker"]
}

target "engine" {
  inherits   = ["_common"]
  dockerfile = "images/engine/Dockerfile"
  args       = { BASE_IMAGE = BASE_IMAGE }
  secret = concat(
    CA_BUNDLE != "" ? ["id=ca_bundle,src=${CA_BUNDLE}"] : [],
    PIP_CONF != "" ? ["id=pip_conf,src=${PIP_CONF}"] : [],
  )
  tags   = [ENGINE_TAG]
  output = ["type=docker"]
}
