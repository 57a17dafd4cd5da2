{{- define "coppice.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "coppice.selector" -}}
app.kubernetes.io/name: coppice
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "coppice.labels" -}}
{{ include "coppice.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "coppice.image" -}}
{{- if .digest -}}
{{ printf "%s@%s" .repository .digest }}
{{- else -}}
{{ printf "%s:%s" .repository .tag }}
{{- end -}}
{{- end -}}

{{/* What a container without any privilege is. */}}
{{- define "coppice.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "coppice.nobody" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The API, for pods. */}}
{{- define "coppice.server" -}}
{{- if .Values.controller.tls.existingSecret -}}https{{- else -}}http{{- end -}}://{{ include "coppice.fullname" . }}-controller.{{ .Release.Namespace }}.svc:{{ .Values.controller.service.port }}
{{- end -}}

{{/* What makes join tokens, as a client of the API: who it is, and whom it believes. */}}
{{- define "coppice.clientEnv" -}}
- {name: COPPICE_SERVER, value: {{ include "coppice.server" . | quote }}}
- {name: COPPICE_TOKEN_FILE, value: /secrets/join/join.key}
{{- if .Values.controller.tls.existingSecret }}
- {name: SSL_CERT_FILE, value: /secrets/api-tls/ca.crt}
{{- end }}
{{- end -}}

{{- define "coppice.clientMounts" -}}
- {name: join-key, mountPath: /secrets/join, readOnly: true}
{{- if .Values.controller.tls.existingSecret }}
- {name: api-ca, mountPath: /secrets/api-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "coppice.clientVolumes" -}}
- name: join-key
  secret:
    secretName: {{ .Values.joinKey.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .Values.joinKey.key | quote }}, path: join.key}]
{{- if .Values.controller.tls.existingSecret }}
- name: api-ca
  secret:
    secretName: {{ .Values.controller.tls.existingSecret }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end -}}

{{/* The store of checkpoints, the same for controllers and runners. */}}
{{- define "coppice.storeEnv" -}}
- {name: COPPICE_STORE, value: {{ .Values.store.url | quote }}}
- {name: COPPICE_STORE_ACCESS_KEY_FILE, value: {{ printf "/secrets/store/%s" .Values.store.accessKey | quote }}}
- {name: COPPICE_STORE_SECRET_KEY_FILE, value: {{ printf "/secrets/store/%s" .Values.store.secretKey | quote }}}
{{- end -}}

{{/* How controllers know Vault. */}}
{{- define "coppice.vaultEnv" -}}
{{- if .address -}}
- {name: COPPICE_VAULT_ADDR, value: {{ .address | quote }}}
- {name: COPPICE_VAULT_PREFIX, value: {{ .prefix | quote }}}
- {name: COPPICE_VAULT_NAMESPACE, value: {{ .namespace | quote }}}
- {name: COPPICE_VAULT_AUTH_MOUNT, value: {{ .authMount | quote }}}
{{- if .kubernetesRole }}
- {name: COPPICE_VAULT_KUBERNETES_ROLE, value: {{ .kubernetesRole | quote }}}
- {name: COPPICE_VAULT_KUBERNETES_TOKEN_FILE, value: /secrets/vault-identity/token}
{{- else }}
- {name: COPPICE_VAULT_ROLE_ID_FILE, value: /secrets/vault/role-id}
- {name: COPPICE_VAULT_SECRET_ID_FILE, value: /secrets/vault/secret-id}
{{- end }}
{{- if .ca }}
- {name: COPPICE_VAULT_CA_FILE, value: /secrets/vault/ca.crt}
{{- end }}
{{- end }}
{{- end }}
