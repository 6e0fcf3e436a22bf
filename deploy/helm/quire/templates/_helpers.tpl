{{- define "quire.labels" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "quire.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "quire.probe" -}}
{{- if .Values.tls.secret -}}
exec: {command: [python, /opt/health.py]}
{{- else -}}
grpc: {port: 50051}
{{- end }}
{{- end }}

{{- define "quire.liveness" -}}
{{- if .Values.tls.secret -}}
exec: {command: [python, /opt/health.py, "50051", liveness]}
{{- else -}}
grpc: {port: 50051, service: liveness}
{{- end }}
{{- end }}
