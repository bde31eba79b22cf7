// In the place of Elastic's client: Jaeger links it for a storage that is not used here, and its 847 packages are a third
// of all that there is to compile.
module github.com/elastic/go-elasticsearch/v9

go 1.26
