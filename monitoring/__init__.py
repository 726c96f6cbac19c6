"""Files for Prometheus, Alertmanager and Grafana: rules and their tests, dashboards, and the page that draws these."""
