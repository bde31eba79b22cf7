"""The dashboards as code: one module a dashboard; `build` turns them into Grafana's JSON."""
